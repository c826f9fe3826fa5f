"""Where sequences that follow each other in an array are in 8 bits: each in blocks of its own.

So no two share a scale, nor a block of transposed values. Sequence i, whose first token is
``cu_seqlens[i]``, begins at block ``cu_seqlens[i] // ROWS + i``, which leaves out a block here and
there, and which a kernel finds without reading the offsets of others.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from cufa.arrays import Array

ROWS = 128
"""Rows of a block."""


def blocks_of(tokens: int, sequences: int) -> int:
    """Return how many blocks hold the tokens of all sequences; none if there are none."""
    return tokens // ROWS + sequences if sequences else 0


def laid_out(x: np.ndarray, cu_seqlens: np.ndarray, used: np.ndarray | None) -> np.ndarray:
    """Return (1, heads, tokens, head_dim) with sequences in blocks of their own, and zeros between.

    Parameters
    ----------
    x : ndarray
    cu_seqlens : ndarray of int32
    used : ndarray, optional
        How many of each sequence's rows count; the others become zeros.
    """
    _, heads, tokens, head_dim = x.shape
    sequences = len(cu_seqlens) - 1
    found = np.zeros((1, heads, blocks_of(tokens, sequences) * ROWS, head_dim), x.dtype)
    for i in range(sequences):
        first, end = int(cu_seqlens[i]), int(cu_seqlens[i + 1])
        if used is not None:
            end = min(end, first + int(used[i]))
        row = (first // ROWS + i) * ROWS
        found[:, :, row : row + end - first] = x[:, :, first:end]
    return found


def in_order(rows: Array, cu_seqlens: Array, tokens: int, xp: ModuleType) -> Array:
    """Return (1, heads, tokens, columns) of rows in blocks; tokens of no sequence are 0."""
    sequences = len(cu_seqlens) - 1
    if sequences == 0 or tokens == 0:
        return xp.zeros((1, rows.shape[1], tokens, rows.shape[3]), rows.dtype)
    token = xp.arange(tokens)
    ended = xp.searchsorted(cu_seqlens[1:], token, side="right")
    sequence = xp.minimum(ended, sequences - 1)
    first = cu_seqlens[sequence]
    at = (first // ROWS + sequence) * ROWS + token - first
    found = rows[:, :, xp.clip(at, 0, rows.shape[2] - 1)]
    return xp.where((ended < sequences)[:, None], found, xp.zeros((), rows.dtype))
