"""Kernels that were compiled ahead of time, in the user's cache folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cufa import disk_cache
from cufa.compiler import source
from cufa.compiler.nvrtc import CUPYS_OPTIONS
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant


def path(variant: Variant | Instance, arch: str, nvrtc: tuple[int, int]) -> Path:
    """Return where a kernel that was compiled ahead of time is, or would be.

    Parameters
    ----------
    variant : Variant or Instance
    arch : str
        Such as "sm_90a".
    nvrtc : tuple of int
        Major and minor version of the compiler: another one's kernel is another kernel.

    Raises
    ------
    OSError
        As `disk_cache.folder`.
    """
    compiler = "NVRTC {}.{}".format(*nvrtc)
    key = "\0".join((source.of(variant), variant.name_expression, arch, compiler, *CUPYS_OPTIONS))
    return disk_cache.folder() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"


def find(variant: Variant | Instance, arch: str, nvrtc: tuple[int, int]) -> bytes | None:
    """Return a kernel that was compiled ahead of time, or None as `disk_cache.read` does."""
    try:
        return disk_cache.read(path(variant, arch, nvrtc))
    except OSError:
        return None


def store(variant: Variant | Instance, arch: str, nvrtc: tuple[int, int], cubin: bytes) -> Path:
    """Keep a compiled kernel for calls to come, and return its file.

    Raises
    ------
    OSError
    """
    file = path(variant, arch, nvrtc)
    disk_cache.write(file, cubin)
    return file
