"""The errors that a user can act on."""

from cufa import optional


class ModelError(Exception):
    """A model cannot be loaded or run here; the message is one line and says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def missing_package(package: str, extra: str) -> ModelError:
    """Return the error of a package that is not installed, with the extra that brings it."""
    return ModelError(f"the package {package} is not installed: {optional.install(extra)}")
