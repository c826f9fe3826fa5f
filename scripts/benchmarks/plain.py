"""Attention as an array library's user writes it: matmul, softmax, matmul."""

from __future__ import annotations

from typing import Any

CHUNK_ELEMENTS = 1 << 28
"""Scores held at once: 1 GiB in float32."""

BATCHED_BELOW = 2048
"""Sequence length under which 16-bit operands are batched in float32 (see `attention`)."""


def attention(xp: Any, q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
    """Plain attention in the array library `xp` (NumPy or CuPy).

    The score matrices of as many heads as fit in `CHUNK_ELEMENTS` are held at once. CuPy 14
    multiplies stacks of matrices in float32 at best (float16 is converted, bfloat16 refused),
    but single 16-bit matrices on tensor cores. So 16-bit operands are converted and batched
    where matrices are small and launches dominate, and multiplied head by head where they are
    large: the faster way at either end.

    Operands are contiguous, (batch, heads, seq, head_dim), and with a causal mask the last query
    sees all keys. Where `k` and `v` have fewer heads, each serves as many of `q` in a row, and is
    repeated for them.
    """
    b, h, sq, _ = q.shape
    sk, dv = v.shape[2:]
    if k.shape[1] != h:
        k, v = (xp.repeat(x, h // k.shape[1], axis=1) for x in (k, v))
    q3, k3, v3 = (x.reshape(b * h, *x.shape[2:]) for x in (q, k, v))
    bias = None
    if causal:
        seen = xp.tri(sq, sk, sk - sq, dtype=bool)
        bias = xp.where(seen, 0.0, -xp.inf).astype(xp.float32, copy=False)
    out = xp.empty((b * h, sq, dv), dtype=q.dtype)
    product = _stacked if q.dtype == xp.float32 or max(sq, sk) < BATCHED_BELOW else _head_by_head
    heads = max(1, CHUNK_ELEMENTS // (sq * sk))
    for first in range(0, b * h, heads):
        part = slice(first, first + heads)
        scores = product(xp, q3[part], k3[part].swapaxes(1, 2)).astype(xp.float32, copy=False)
        scores *= xp.float32(scale)
        if bias is not None:
            scores += bias
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        if product is _head_by_head:
            scores = scores.astype(q.dtype)
        out[part] = product(xp, scores, v3[part])
    return out.reshape(b, h, sq, dv)


def _stacked(xp: Any, a: Any, b: Any) -> Any:
    """Return all products in one float32 call."""
    return xp.matmul(a.astype(xp.float32, copy=False), b.astype(xp.float32, copy=False))


def _head_by_head(xp: Any, a: Any, b: Any) -> Any:
    """Return the products in the operands' dtype, one call a head."""
    out = xp.empty((a.shape[0], a.shape[1], b.shape[2]), dtype=a.dtype)
    for i in range(a.shape[0]):
        xp.dot(a[i], b[i], out=out[i])
    return out
