"""The user's cache folder: kernels that were compiled ahead of time, and tuned tables.

Nothing is written there but by the commands that say so; what `cufa.attention` compiles itself is
in CuPy's own cache.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from cufa.warned import warn


def folder() -> Path:
    """Return the cache folder, which need not exist.

    It is ``$CUFA_CACHE_DIR``, which may begin with ``~``, else ``$XDG_CACHE_HOME/cufa``, else
    ``~/.cache/cufa``.

    Raises
    ------
    OSError
        It would be in a home folder, and there is none.
    """
    own, xdg = os.environ.get("CUFA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()  # no shell expands it in a Dockerfile
        return (Path(xdg) if xdg else Path.home() / ".cache") / "cufa"
    except RuntimeError as e:
        raise OSError(
            "there is no home folder for the cache: set CUFA_CACHE_DIR to a full path"
        ) from e


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing.

    Whatever the umask, others may not write them: `read` would ignore what they hold.

    Raises
    ------
    OSError
    """
    for each in (*reversed(path.parents), path):
        each.mkdir(mode=0o755, exist_ok=True)


def write(path: Path, data: bytes) -> None:
    """Write a file and the folders above it; a reader sees it whole, or as it was before.

    Raises
    ------
    OSError
    """
    make_folder(path.parent)
    # Not by `tempfile`, whose files no other user may read: an image's cache is for all of them.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb", opener=lambda name, how: os.open(name, how, 0o644)) as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path) -> bytes | None:
    """Return a file of a cache folder; None if there is none to be read, or none to be trusted.

    A cubin is code that runs, and a tuned table chooses it. So a file that is neither the user's
    nor root's, or that others may write, is ignored with a warning, and so is all that is in such a
    folder, from the cache folder down. Windows has no such owners and modes: there all is taken.

    Parameters
    ----------
    path : Path
        Below `folder`, or in another one, which is then looked at alone.
    """
    try:
        if os.name == "nt":
            return path.read_bytes()
        with _opened(path) as (descriptor, complaint):
            if complaint is None:
                with open(descriptor, "rb", closefd=False) as file:
                    return file.read()
    except OSError:
        return None
    _ignored(complaint)
    return None


def why_ignored(below: Path) -> str | None:
    """Say why `read` would ignore all that is in a folder; None if it would not, or there is none.

    Parameters
    ----------
    below : Path
        The cache folder, or one in it.
    """
    if os.name != "nt":
        with contextlib.suppress(OSError), _opened(below) as (_, complaint):
            return complaint
    return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, str | None]]:
    """Open a file or folder, from the cache folder down: what is looked at is what is read.

    Gives its descriptor, and why it is not to be trusted, or None.
    """
    how = os.O_RDONLY | os.O_NONBLOCK  # not waiting for a writer, should it be a pipe
    top = folder()
    if top not in (path, *path.parents):
        top = path.parent
    place, last, found = Path(), None, None
    with contextlib.ExitStack() as opened:
        for name in (str(top), *path.relative_to(top).parts):
            place, last = place / name, os.open(name, how, dir_fd=last)
            opened.callback(os.close, last)
            found = found or _complaint(place, os.fstat(last))
        assert last is not None
        yield last, found


def _complaint(place: Path, found: os.stat_result) -> str | None:
    """Say why what is in a file or folder could be somebody else's, or return None."""
    if found.st_uid not in (0, os.geteuid()):
        return f"{place} is ignored: it belongs to another user, of number {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{place} is ignored: others may write it, see chmod go-w"
    return None


@functools.cache
def _ignored(complaint: str) -> None:
    """Warn, once a process for each file or folder."""
    warn(complaint)


def size_bytes(below: Path) -> int:
    """Return the size of all files below a folder together; 0 if there is none."""
    total = 0
    for parent, _, names in os.walk(below):
        for name in names:
            with contextlib.suppress(OSError):  # another process may have removed it
                total += os.stat(os.path.join(parent, name)).st_size
    return total
