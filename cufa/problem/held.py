"""Keys or values of 8 bits as a cache holds them, for the kernel that expands them."""

from __future__ import annotations

from typing import NamedTuple

from cufa.arrays import Array


class Held(NamedTuple):
    """Keys or values of 8 bits of sequences in a cache of one layer.

    Attributes
    ----------
    values : array, (batch, heads_kv, capacity, head_dim) or (pages, heads_kv, page_size, head_dim)
        Bytes.
    scales : array, (batch, heads_kv, capacity) or (pages, heads_kv, page_size)
        float32.
    block_table : array or None, (batch, pages a sequence) int32
    mean : array or None, (batch, heads_kv, head_dim)
        float32 rows that were taken off.
    """

    values: Array
    scales: Array
    block_table: Array | None
    mean: Array | None = None
