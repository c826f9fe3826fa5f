"""Values as the matrix units of Hopper take them in 8 bits: along the keys, in blocks of them.

16 keys are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: a thread has the weights of
these four by four. The 16 pairs of 32 columns are in the order 0 4 8 12 1 5 9 13 2 6 10 14 3 7 11
15: a thread has the results of every fourth of these, which are neighbours in V.
"""

from __future__ import annotations

from types import ModuleType

from cufa.arrays import Array

KEYS = 128
"""Keys of a block."""


def transposed(rows: Array, xp: ModuleType) -> Array:
    """Return (batch, heads, seq, columns) as (batch, heads, blocks, columns, KEYS), contiguous.

    Behind the last key are zeros.
    """
    batch, heads, seq, columns = rows.shape
    blocks = -(-seq // KEYS)
    whole = xp.zeros((batch, heads, blocks * KEYS, columns), rows.dtype)
    whole[:, :, :seq] = rows
    by_key = whole.reshape(batch, heads, blocks, KEYS // 16, 2, 4, 2, columns // 32, 4, 4, 2)
    ordered = by_key.transpose(0, 1, 2, 7, 9, 8, 10, 3, 5, 4, 6)
    return xp.ascontiguousarray(ordered).reshape(batch, heads, blocks, columns, KEYS)


def rows_of(values: Array, seq: int) -> Array:
    """Return what `transposed` was given."""
    batch, heads, blocks, columns, _ = values.shape
    ordered = values.reshape(batch, heads, blocks, columns // 32, 4, 4, 2, KEYS // 16, 4, 2, 2)
    by_key = ordered.transpose(0, 1, 2, 7, 9, 8, 10, 3, 5, 4, 6)
    return by_key.reshape(batch, heads, blocks * KEYS, columns)[:, :, :seq]
