"""The user's cache folder: kernels that were compiled ahead of time, and tuned tables.

Nothing is written there but by the commands that say so; what `cufa.attention` compiles itself is
in CuPy's own cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

from cufa.compiler import source
from cufa.variant import Variant


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


def write(path: Path, data: bytes) -> None:
    """Write a file and the folders above it; a reader sees it whole, or as it was before.

    Raises
    ------
    OSError
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by `tempfile`, whose files no other user may read: an image's cache is for all of them.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def size_bytes(below: Path) -> int:
    """Return the size of all files below a folder together; 0 if there is none."""
    total = 0
    for parent, _, names in os.walk(below):
        for name in names:
            with contextlib.suppress(OSError):  # another process may have removed it
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def cubin_path(variant: Variant, arch: str) -> Path:
    """Return where a kernel that was compiled ahead of time is, or would be.

    Parameters
    ----------
    variant : Variant
    arch : str
        Such as "sm_90a".

    Raises
    ------
    OSError
        As `folder`.
    """
    key = "\0".join((source.text(variant.kernel), variant.name_expression, arch))
    return folder() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"


def find_cubin(variant: Variant, arch: str) -> bytes | None:
    """Return a kernel that was compiled ahead of time, or None if there is none to be read."""
    try:
        return cubin_path(variant, arch).read_bytes()
    except OSError:
        return None


def store_cubin(variant: Variant, arch: str, cubin: bytes) -> Path:
    """Keep a compiled kernel for calls to come, and return its file.

    Raises
    ------
    OSError
    """
    path = cubin_path(variant, arch)
    write(path, cubin)
    return path
