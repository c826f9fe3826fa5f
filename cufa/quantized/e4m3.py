"""The 8-bit floating point of arrays: a sign, four bits of exponent, three of mantissa."""

from __future__ import annotations

from types import ModuleType

import ml_dtypes
import numpy as np

from cufa.arrays import Array

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
"""On NumPy arrays. CuPy has no such type: there, the bytes are uint8."""

LARGEST = np.float32(448)

NAN = np.uint8(0x7F)
"""The byte that stands for NaN; there are no infinities."""


def expanded(values: Array, xp: ModuleType) -> Array:
    """Return the numbers that bytes stand for, float32.

    Parameters
    ----------
    values : array
        `E4M3`, or uint8.
    xp : module
        The module that `values` belongs to.
    """
    of_bytes = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    return xp.asarray(of_bytes)[values.view(np.uint8)]


def rounded(y: np.ndarray) -> np.ndarray:
    """Return the nearest numbers of 8 bits: beyond the largest, the largest; NaN for infinities.

    Parameters
    ----------
    y : ndarray of float32

    Returns
    -------
    ndarray of `E4M3`
        Ties go to the even mantissa.
    """
    values = np.clip(y, -LARGEST, LARGEST).astype(E4M3)
    values.view(np.uint8)[~np.isfinite(y)] = NAN
    return values
