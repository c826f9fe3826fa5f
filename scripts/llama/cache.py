"""Caches of keys and values for a decoder, and attention over them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from models import Array

import cufa
from llama.attention import Attention
from llama.config import Config

#: How keys and values are held: in the model's dtype, or in 8 bits.
CACHES = ("auto", "fp8", "int8")

Cache = Any  # cufa.KVCache, cufa.PagedKVCache or a view of some of their sequences


def make_cache(
    xp: Any,
    config: Config,
    dtype: np.dtype | str,
    capacities: Sequence[int],
    page_size: int | None,
) -> Cache:
    """Return an empty cache of all layers, which turns keys and queries by their positions.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    config : Config
    dtype : numpy.dtype or str
        "fp8" and "int8" for keys and values of 8 bits.
    capacities : sequence of int
        Tokens of each sequence at most.
    page_size : int or None
        Tokens of a page, if the longest sequence has as many; without it, each sequence has room
        for as many as that.
    """
    longest = max(capacities)
    page_size = None if page_size is None else min(page_size, longest)
    rows = longest if page_size is None else -(-longest // page_size) * page_size
    rotaries: dict[int, cufa.Rotary] = {}  # layers of the same rotation share their tables
    for rotation in (attention.rotation for attention in config.attentions):
        if id(rotation) not in rotaries:
            rotaries[id(rotation)] = cufa.Rotary.of_frequencies(
                rotation.frequencies, rows, magnitude=rotation.magnitude, xp=xp
            )
    shared = {
        "dtype": dtype,
        "layers": config.layers,
        "rotary": [rotaries[id(attention.rotation)] for attention in config.attentions],
        "xp": xp,
    }
    if page_size is None:
        return cufa.KVCache(len(capacities), config.kv_heads, longest, config.head_dim, **shared)
    pages = [-(-capacity // page_size) for capacity in capacities]
    cache = cufa.PagedKVCache(
        sum(pages),
        page_size,
        len(pages),
        config.kv_heads,
        config.head_dim,
        pages_per_sequence=max(pages),
        **shared,
    )
    for _ in pages:
        cache.allocate()
    return cache


def attend(
    cache: Cache,
    layer: int,
    how: Attention,
    sinks: Array | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
) -> None:
    """Write the newest tokens' keys and values, and attend from their queries.

    Parameters
    ----------
    cache : Cache
        With room made for them.
    layer : int
    how : Attention
        The layer's.
    sinks : array or None, (heads,) float32
        As in `cufa.attention`.
    q, k, v : array, (sequences, heads or kv_heads, tokens of each, head_dim)
        Without their positions.
    out : array, of q's shape
    """
    q = cache.write(k, v, q=q, layer=layer)
    lengths = cache.host_lengths
    score: dict[str, Any] = {
        "window": how.window,
        "softcap": how.softcap,
        "sinks": sinks,
        "scale": how.scale,
    }
    if q.shape[2] == 1 or lengths.min() != lengths.max():
        cache.decode(q, layer=layer, out=out, **score)
        return
    length = int(lengths[0])
    if cache.scales(layer)[0] is None:
        keys, values = (_in_order(cache, x, length) for x in cache.layer(layer))
    else:
        keys, values = cache.dequantize(layer, dtype=q.dtype, length=length)
    cufa.attention(q, keys, values, causal=True, out=out, **score)


def _in_order(cache: Cache, held: Array, length: int) -> Array:
    """Return keys or values as (sequences, kv_heads, length, head_dim), from pages as a copy."""
    table = cache.block_table
    if table is not None:
        _, heads, page_size, dim = held.shape
        pages = held[table[:, : -(-length // page_size)]].swapaxes(1, 2)
        held = pages.reshape(len(cache), heads, -1, dim)
    return held[:, :, :length]
