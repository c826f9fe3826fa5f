"""Attention as one formula, in the precision of the numbers that it is given.

The oracles of the tests, of the explorer and of the benchmarks are this one; it imports nothing of
the package, so that it shares no mistake with what it checks. Arrays are of ``numpy`` or ``cupy``,
which is `xp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any
Window = tuple[int | None, int | None]


class Places(NamedTuple):
    """The numbers of sequences b, heads h, queries i and keys j, which broadcast to the scores."""

    b: Array
    h: Array
    i: Array
    j: Array
    seq_q: int
    seq_kv: int


def hidden(at: Places, causal: bool | str = False, window: Window = (None, None)) -> Array:
    """Return where the causal mask or the window hides key j from query i."""
    ahead = at.j - (at.i + at.seq_kv - at.seq_q)
    left, right = (at.seq_q + at.seq_kv if edge is None else edge for edge in window)
    found = (ahead < -left) | (ahead > right)
    if causal:
        found |= at.j > at.i if causal == "top-left" else ahead > 0
    return found


def scores_of(
    xp: Any,
    products: Array,
    at: Places,
    *,
    scale: float,
    causal: bool | str = False,
    window: Window = (None, None),
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
) -> Array:
    """Return what the softmax is taken of, from Q K^T, which is overwritten.

    Options are those of `cufa.attention`. Arrays broadcast to the scores; a mask of bits has a byte
    for each eight keys.
    """
    number, scores = products.dtype.type, products
    scores *= number(scale)
    if softcap is not None:
        scores = number(softcap) * xp.tanh(scores / number(softcap))
    if alibi_slopes is not None:
        distance = xp.abs(at.i + at.seq_kv - at.seq_q - at.j).astype(number)
        scores = scores - alibi_slopes.astype(number) * distance
    if bias is not None:
        scores = scores + bias.astype(number)
    if score_mod is not None:
        with np.errstate(invalid="ignore"):
            changed = xp.asarray(score_mod(scores, at.b, at.h, at.i, at.j), number)
        scores = xp.broadcast_to(changed, scores.shape)
    scores = xp.where(hidden(at, causal, window), number(-np.inf), scores)
    if mask is not None:
        if mask.dtype == np.uint8:  # the first key is the highest bit
            j = xp.arange(at.seq_kv)
            mask = (mask[..., j // 8] >> (7 - j % 8).astype(np.uint8)) & 1 != 0
        scores = xp.where(mask, scores, number(-np.inf))
    if mask_mod is not None:
        scores = xp.where(mask_mod(at.b, at.h, at.i, at.j), scores, number(-np.inf))
    return scores


def softmax(xp: Any, scores: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """Return the softmax over the last axis, in place of the scores, and its log-sum-exp.

    A row of -inf gives zeros and -inf. `sinks` are logits in addition to those of the keys.
    """
    zero, one = scores.dtype.type(0), scores.dtype.type(1)
    m = xp.full((*scores.shape[:-1], 1), -np.inf, scores.dtype)
    if scores.shape[-1]:
        m = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(scores.dtype)
        m = xp.maximum(m, sinks)
    shift = xp.where(m == -np.inf, zero, m)
    scores -= shift
    p = xp.exp(scores, out=scores)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += xp.exp(sinks - shift)
    with np.errstate(divide="ignore"):
        lse = (m + xp.log(total))[..., 0]
    p /= xp.where(total == 0, one, total)
    return p, lse


def attend(
    xp: Any,
    q: Array,
    k: Array,
    v: Array,
    at: Places,
    *,
    product: Callable[[Array, Array], Array],
    rounded: Callable[[Array], Array] = lambda x: x,
    sinks: Array | None = None,
    keep: Array | None = None,
    **score: Any,
) -> tuple[Array, Array]:
    """Return attention, and the log-sum-exp of its scores.

    `product` multiplies stacks of matrices, `rounded` rounds between steps, and `keep` are factors
    of the weights; `score` holds the options of `scores_of`.
    """
    scores = scores_of(xp, rounded(product(q, k.swapaxes(-1, -2))), at, **score)
    p, lse = softmax(xp, scores, sinks)
    if keep is not None:
        p = p * keep.astype(p.dtype)
    return rounded(product(rounded(p), v)), lse


def rounding_noise(near: Array, rounded: Callable[[Any], Any]) -> float:
    """Return max|(x + 0.3 - 0.3) - x| in the precision that `rounded` rounds to.

    `near` holds such numbers x, in float32, as does what `rounded` returns.
    """
    third = rounded(np.float32(0.3))
    again = rounded(rounded(near + third) - third)
    return float(abs(again - near).max()) if near.size else 0.0
