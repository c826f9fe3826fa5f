"""Functions of the CUDA driver that CuPy does not offer, and the context that they need."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

INVALID_CONTEXT = 201
"""The driver returns this in a thread that has no context yet (CUDA_ERROR_INVALID_CONTEXT)."""


def function(name: str, *, keeps_lock: bool) -> Any:
    """Return a function of the driver, which returns a CUresult: 0 if all went well.

    Parameters
    ----------
    name : str
    keeps_lock : bool
        Whether it may keep the interpreter's lock: it only computes.
    """
    library = ctypes.PyDLL if keeps_lock else ctypes.CDLL
    return getattr(library("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), name)


def make_context_current() -> None:
    """Do what the runtime does at a thread's first call of it, as CuPy's own functions do."""
    from cupy.cuda import runtime

    runtime.setDevice(runtime.getDevice())
