"""Arrays of a cache of one layer: `Tokens` that are written to it, and what it has `Held`."""

from __future__ import annotations

from typing import NamedTuple

from cufa.arrays import Array
from cufa.problem.rotary import RotaryTables


class Tokens(NamedTuple):
    """New tokens on their way into a cache of one layer.

    Attributes
    ----------
    k, v : array, (batch, heads_kv, seq, head_dim)
    q, turned_q : array or None, (batch, heads_q, seq, head_dim)
        Queries, and where they go when they have been turned.
    k_cache, v_cache : array, (batch, heads_kv, capacity, ...) or (pages, heads_kv, page_size, ...)
    starts, lengths : array, (batch,) int32
        Tokens of each sequence before these, and with them. Token t is at position
        lengths - seq + t, and new if that is not below starts.
    block_table : array or None, (batch, pages a sequence) int32
    rotary : RotaryTables or None
    k_scale, v_scale : array or None, (batch, heads_kv, capacity) or (pages, heads_kv, page_size)
        float32 scales of the rows of a cache of 8 bits.
    k_mean : array or None, (batch, heads_kv, head_dim)
        float32 rows that are taken off keys; the first tokens of a sequence say which.
    """

    k: Array
    v: Array
    q: Array | None
    turned_q: Array | None
    k_cache: Array
    v_cache: Array
    starts: Array
    lengths: Array
    block_table: Array | None
    rotary: RotaryTables | None
    k_scale: Array | None = None
    v_scale: Array | None = None
    k_mean: Array | None = None


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
