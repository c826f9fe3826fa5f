"""Queries or keys -> launches of ``kernels/append.cu``, which turns them without any cache."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Array
from cufa.launch import append
from cufa.launch.capture import is_capturing
from cufa.problem.rotary import RotaryTables
from cufa.problem.tokens import Tokens


def refuse_capture() -> None:
    """Raise an error if the current stream is being captured into a CUDA graph."""
    if is_capturing():
        raise RuntimeError(
            "Rotary.apply cannot be captured into a CUDA graph, which would go on using memory "
            "that is free after the call: call it before the capture, or write to a cache that has "
            "the rotary, which can be captured"
        )


def turn(x: Array, turned: Array, positions: Array, rotary: RotaryTables) -> None:
    """Turn tokens on the current device and stream.

    Parameters
    ----------
    x, turned : array, (batch, heads, seq, head_dim)
        CuPy arrays, not empty: the tokens, and where they go.
    positions : array, (batch, seq) of integers
        On the host or the device.
    rotary : RotaryTables

    Notes
    -----
    To the kernel each token is the one new token of a sequence, and there are no heads of keys and
    values. A sequence's tokens are as far from each other as the next sequence's are, or else each
    sequence has a launch of its own.
    """
    import cupy

    x = append.in_rows("x", x)
    batch, _, seq, dim = x.shape
    within = positions.astype(np.int64).clip(-1, rotary.positions)  # the kernel turns neither end
    ends = cupy.asarray(within.astype(np.int32) + np.int32(1)).ravel()
    starts = cupy.zeros(batch * seq, np.int32)
    cache = cupy.empty((1, 0, rotary.positions, dim), x.dtype)
    in_step = seq == 1 or all(each.strides[0] == seq * each.strides[2] for each in (x, turned))
    whole = [slice(0, batch)]
    for part in whole if in_step else [slice(i, i + 1) for i in range(batch)]:
        rows = slice(part.start * seq, part.stop * seq)
        q, to = (_as_sequences(each[part]) for each in (x, turned))
        none, its = q[:, :0], (starts[rows], ends[rows])
        append.append(Tokens(none, none, q, to, cache, cache, *its, None, rotary))


def _as_sequences(x: Array) -> Array:
    """View (batch, heads, seq, head_dim) tokens as (batch * seq, heads, 1, head_dim)."""
    import cupy

    batch, heads, seq, dim = x.shape
    of_batch, of_head, of_token, of_element = x.strides
    step = of_batch if seq == 1 else of_token
    shape, strides = (batch * seq, heads, 1, dim), (step, of_head, step, of_element)
    return cupy.lib.stride_tricks.as_strided(x, shape, strides)
