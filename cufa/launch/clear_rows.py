"""Arrays -> launch of ``kernels/clear_rows.cu``."""

from __future__ import annotations

import functools

import numpy as np

from cufa.arrays import ALIGNMENT, Array
from cufa.launch.auxiliary import address, prepared
from cufa.launch.launch import Launch
from cufa.specs.clear_rows import ROWS, SPEC
from cufa.specs.instance import Instance

_WORD = 2  # bytes
_PLACES = ((0, 0), (1, 1), (2, 2), (3, 3))  # of the addresses, which the parameter begins with


def clear_rows(
    out: Array | None,
    lse: Array | None,
    cu_seqlens: Array,
    max_seqlen: int,
    used: Array | None = None,
) -> None:
    """Clear the rows that no sequence has, on the current device and stream.

    Parameters
    ----------
    out : cupy.ndarray, (rows, heads, head_dim), or None
        Contiguous; its rows become 0.
    lse : cupy.ndarray, (heads, rows) float32, or None
        Contiguous; its rows become -inf.
    cu_seqlens : cupy.ndarray, (sequences + 1,) int32
        Contiguous.
    max_seqlen : int
        Rows of a sequence that count, the first ones.
    used : cupy.ndarray, (sequences,) int32, optional
        Contiguous: how many count of each.
    """
    import cupy

    if out is not None:
        rows, heads, row_bytes = out.shape[0], out.shape[1], out.nbytes // max(1, out.shape[0])
    elif lse is not None:
        (heads, rows), row_bytes = lse.shape, 0
    else:
        return
    if rows == 0 or heads == 0:
        return
    sizes = row_bytes, rows, heads, cu_seqlens.size - 1, max_seqlen
    launch = _prepared(cupy.cuda.runtime.getDevice(), *sizes)
    launch(*map(address, (out, lse, cu_seqlens, used)))


@functools.lru_cache(maxsize=128)
def _prepared(
    device_id: int, row_bytes: int, rows: int, heads: int, sequences: int, max_seqlen: int
) -> Launch:
    """Return a launch on a device, the current one, that is given the addresses."""
    parameter = np.zeros(1, SPEC.params)
    parameter[0] = 0, 0, 0, 0, row_bytes // _WORD, rows, heads, sequences, max_seqlen
    at_once = 1 if row_bytes % ALIGNMENT else ALIGNMENT // _WORD
    return prepared(Instance(SPEC.name, (), (at_once,)), -(-rows // ROWS), parameter, _PLACES)
