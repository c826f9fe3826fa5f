"""New tokens into a cache of NumPy arrays."""

from __future__ import annotations

import numpy as np

from cufa.problem.rotary import RotaryTables
from cufa.problem.tokens import Tokens


def append(tokens: Tokens) -> None:
    """Write tokens, as ``kernels/append.cu`` does.

    Parameters
    ----------
    tokens : Tokens
    """
    k, v, q, turned_q, k_cache, v_cache, starts, lengths, table, rotary = tokens
    seq = k.shape[2]
    positions = lengths[:, None] - seq + np.arange(seq)
    if rotary is not None:
        k = turned(k, positions, rotary)
        if q is not None and turned_q is not None:
            new = (positions >= starts[:, None])[:, None, :, None]
            turned_q[...] = np.where(new, turned(q, positions, rotary), q)
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        new = slice(seq - (length - start), seq)
        for cache, rows in ((k_cache, k[i]), (v_cache, v[i])):
            if table is None:
                cache[i, :, start:length] = rows[:, new]
            else:
                page, slot = np.divmod(np.arange(start, length), cache.shape[2])
                cache[table[i, page], :, slot] = rows[:, new].swapaxes(0, 1)


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
