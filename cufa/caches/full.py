"""CacheFullError: there is no room for more."""


class CacheFullError(RuntimeError):
    """A cache has no room for what was asked of it, and has not changed.

    It is out of capacity, pages or sequences; the message says which. Freeing sequences or
    cutting them short makes room.
    """
