"""CUtensorMap: how TMA, Hopper's copy engine, finds its way in a tensor."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

WORDS = 16
"""64-bit words of a map."""

_ALIGNMENT = 64  # bytes, of a map that the driver writes
_BFLOAT16, _FLOAT16 = 9, 6  # CUtensorMapDataType
_SWIZZLE = {16: 1, 32: 2, 64: 3}  # CUtensorMapSwizzle by 16-bit columns of a box: 32, 64, 128 bytes
_L2_PROMOTION_256B = 3


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def encode(view: Any, pack: int, rows: int, columns: int) -> np.ndarray:
    """Return the map of an array whose boxes are panels of a tile in shared memory.

    Its axes are, the innermost first: (head_dim, pack, seq, heads / pack, batch).

    Parameters
    ----------
    view : cupy.ndarray, shape (batch, heads, seq, head_dim)
        16-bit elements; the last axis contiguous, other strides positive multiples of 16 bytes.
    pack : int
        Neighbouring heads whose rows lie together in a box, query by query.
    rows : int
        Rows of a box, of all its heads.
    columns : int
        Columns of a box: 16, 32 or 64.

    Returns
    -------
    ndarray, shape (16,), uint64
        The address is in the first word.

    Raises
    ------
    RuntimeError
        The driver refuses.
    """
    batch, heads, seq, head_dim = view.shape
    of_batch, of_head, of_seq, _ = view.strides
    axes = [
        (pack, of_head, pack),
        (seq, of_seq, rows // pack),
        (heads // pack, of_head * pack, 1),
        (batch, of_batch, 1),
    ]
    sizes = [head_dim, *(n for n, _, _ in axes)]
    strides = [stride if n > 1 else 16 for n, stride, _ in axes]  # that of a single one is not used
    boxes = [columns, *(box for _, _, box in axes)]
    buffer = np.zeros(2 * WORDS, np.uint64)
    start = -buffer.ctypes.data % _ALIGNMENT // 8
    words = buffer[start : start + WORDS]
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(words.ctypes.data),
        _FLOAT16 if view.dtype == np.float16 else _BFLOAT16,
        len(sizes),
        ctypes.c_void_p(view.data.ptr),
        (ctypes.c_uint64 * 5)(*sizes),
        (ctypes.c_uint64 * 4)(*strides),
        (ctypes.c_uint32 * 5)(*boxes),
        (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1),
        0,  # not interleaved
        _SWIZZLE[columns],
        _L2_PROMOTION_256B,
        0,  # zeros for what lies outside
    )
    # Later calls put another address there; no other word depends on it.
    if status or int(words[0]) != view.data.ptr:
        raise RuntimeError(
            f"the driver cannot describe an array of shape {view.shape}, strides {view.strides} "
            f"to TMA (cuTensorMapEncodeTiled: {status})"
        )
    return words.copy()
