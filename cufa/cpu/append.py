"""New tokens into a cache of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.problem.rotary import RotaryTables
from cufa.problem.tokens import Tokens
from cufa.quantized.rows import MEAN_TOKENS, kind_of, mean_of, quantized_rows


def append(tokens: Tokens) -> None:
    """Write tokens, as ``append.cu``, or ``means8.cu`` and ``append8.cu``, do.

    Parameters
    ----------
    tokens : Tokens
    """
    k, v, q, rotary = tokens.k, tokens.v, tokens.q, tokens.rotary
    seq = k.shape[2]
    positions = tokens.lengths[:, None] - seq + np.arange(seq)
    if tokens.k_scale is not None:  # from float32, which is rounded once
        k, v = (x.astype(np.float32) for x in (k, v))
    if rotary is not None:
        k = turned(k, positions, rotary)
        if q is not None and tokens.turned_q is not None:
            new = (positions >= tokens.starts[:, None])[:, None, :, None]
            tokens.turned_q[...] = np.where(new, turned(q, positions, rotary), q)
    if tokens.k_mean is not None:
        _take_means(tokens, k)
        with np.errstate(all="ignore"):
            k = k - tokens.k_mean[:, :, None]
    if tokens.k_scale is None:
        _put(tokens, ((tokens.k_cache, k), (tokens.v_cache, v)))
        return
    kind = kind_of(tokens.k_cache)
    of_k, of_v = quantized_rows(k, kind), quantized_rows(v, kind)
    kept: tuple[Any, ...] = (tokens.k_cache, tokens.k_scale, tokens.v_cache, tokens.v_scale)
    _put(tokens, tuple(zip(kept, (*of_k, *of_v), strict=True)))


def _take_means(tokens: Tokens, k: np.ndarray) -> None:
    """Take the means of sequences that begin, as ``kernels/means8.cu`` does."""
    assert tokens.k_mean is not None
    for i, (start, length) in enumerate(zip(tokens.starts, tokens.lengths, strict=True)):
        if start == 0 and length > 0:
            first = k.shape[2] - int(length)
            tokens.k_mean[i] = mean_of(k[i, :, first : first + MEAN_TOKENS])


def _put(tokens: Tokens, arrays: tuple[tuple[np.ndarray, np.ndarray], ...]) -> None:
    """Copy what is new of arrays (batch, heads_kv, seq, ...) into those of the cache."""
    table, seq = tokens.block_table, tokens.k.shape[2]
    each = zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True)
    for i, (start, length) in enumerate(each):
        new = slice(seq - (length - start), seq)
        for cache, rows in arrays:
            if table is None:
                cache[i, :, start:length] = rows[i, :, new]
            else:
                page, slot = np.divmod(np.arange(start, length), cache.shape[2])
                cache[table[i, page], :, slot] = rows[i, :, new].swapaxes(0, 1)


def turned(x: np.ndarray, positions: np.ndarray, rotary: RotaryTables) -> np.ndarray:
    """Return (batch, heads, seq, head_dim) turned by (batch, seq) positions, in x's dtype."""
    at = positions.clip(0)[:, None]  # what is before the first token is not used
    cos, sin = rotary.cos[at], rotary.sin[at]
    dim, half = rotary.dim, rotary.dim // 2
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2))
        if rotary.interleaved
        else (slice(half), slice(half, dim))
    )
    turned = np.array(x)
    with np.errstate(all="ignore"):  # infinities and NaN are the caller's business
        a, b = (np.asarray(x[..., part], np.float32) for part in (first, second))
        turned[..., first] = a * cos - b * sin
        turned[..., second] = b * cos + a * sin
    return turned
