"""Functions of the CUDA driver that CuPy does not offer."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


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
