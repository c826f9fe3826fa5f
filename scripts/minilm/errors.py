"""The error that a user can act on."""


class ModelError(Exception):
    """The model cannot be loaded or run here; the message is one line and says what to do."""
