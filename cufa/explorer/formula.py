"""Attention as one formula, in the precision of the numbers that it is given.

The oracles of the tests, of the explorer and of the benchmarks are this one. It takes nothing of
the package but `changed` and `hides` of each feature, which nothing else uses, so that it shares no
mistake with what it checks. Arrays are of ``numpy`` or ``cupy``, which is `xp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cufa.features import FEATURES
from cufa.features.feature import Feature, Places

Array = Any


def hidden(xp: Any, at: Places, **options: Any) -> Array:
    """Return where masks hide key j from query i; options are those of `cufa.attention`."""
    hidden = xp.zeros((), bool)
    for kind, value in _features(options):
        by_feature = kind.hides(value, at, xp)
        hidden = hidden if by_feature is None else hidden | by_feature
    return hidden


def scores_of(xp: Any, products: Array, at: Places, *, scale: float, **options: Any) -> Array:
    """Return the scores that the softmax takes, from Q K^T, which is overwritten.

    Options are those of `cufa.attention`, but that arrays broadcast to the scores; a mask of bits
    has a byte for each eight keys.
    """
    number, scores = products.dtype.type, products
    scores *= number(scale)
    for kind, value in _features(options):
        scores = kind.changed(value, scores, at, xp)
    return xp.where(hidden(xp, at, **options), number(-np.inf), scores)


def _features(options: dict[str, Any]) -> list[tuple[type[Feature], Any]]:
    """Return the features that options ask for, and the options' values."""
    unknown = options.keys() - {kind.ARGUMENT for kind in FEATURES}
    if unknown:
        raise TypeError(f"there is no {min(unknown)} in the formula")
    values = ((kind, options.get(kind.ARGUMENT)) for kind in FEATURES)
    return [(kind, value) for kind, value in values if value is not None]


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
