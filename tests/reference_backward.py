"""The oracle of gradients: in float64, a naive twin in the input dtype, and the rule to accept.

The scores are those of the formula that the forward pass is held to. Their derivatives by Q K^T and
by a bias are differences of that formula in float64, so that nothing here shares a mistake with
what is tested. The rule is that of `reference`, array by array and head by head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from reference import DTYPES, _largest_error, _of_group, _places, _rounded, to_host

from cufa.explorer import formula

STEP = 2.0**-16
"""Step of differences; the formula is smooth but for kinks, which random scores are not at."""

FEW = 20_000
"""Numbers of a gradient that are few."""

Found = Mapping[str, Any]
"""Gradients by the name of what they are of; those of q, k and v as (batch, heads, seq, dim)."""


def gradients_of(wrt: tuple[str, ...], found: tuple[Any, ...]) -> dict[str, Any]:
    """Return the result of a call by name."""
    return dict(zip(wrt, found, strict=True))


def _summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over axes that a shape lacks, or in which it has length 1."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    lacks = tuple(i for i, (n, m) in enumerate(zip(shape, x.shape, strict=True)) if n == 1 < m)
    return x.sum(axis=lacks, keepdims=True)


class _Scores:
    """The scores of a call in float64, and their derivatives.

    Attributes
    ----------
    options : dict
        As the formula takes them.
    slope, slope_of_bias : ndarray
        Derivatives of each score by its product, with the scale, and by its element of a bias.
    """

    def __init__(self, q: np.ndarray, k: np.ndarray, **score: Any) -> None:
        self.sinks, self.keep = score.pop("sinks", None), score.pop("keep", None)
        slopes, scale = score.pop("alibi_slopes", None), score.pop("scale", None)
        self.options = score | {
            "alibi_slopes": None if slopes is None else slopes[..., None, None],
            "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        }
        self.places = _places((*q.shape[:3], k.shape[2]))
        q, k = q.astype(np.float64), k.astype(np.float64)
        self._products = products = _of_group(q, k.swapaxes(-1, -2))
        ahead, back = (self.of(products + step) for step in (STEP, -STEP))
        self.slope = _difference(ahead, back)
        self.slope_of_bias: np.ndarray | None = None
        bias = score.get("bias")
        if bias is not None:
            ahead, back = (
                self.of(products, bias=bias.astype(np.float64) + step) for step in (STEP, -STEP)
            )
            self.slope_of_bias = _difference(ahead, back)

    def of(self, products: np.ndarray, **others: Any) -> np.ndarray:
        """Return the scores of products."""
        options = self.options | others
        with np.errstate(invalid="ignore"):
            return formula.scores_of(np, products.copy(), self.places, **options)

    def naive_slope(self, products: np.ndarray) -> np.ndarray:
        """Return the slope in which that of a softcap is 1 - tanh^2, in float32."""
        softcap, scale = self.options.get("softcap"), self.options["scale"]
        if softcap is None or scale == 0:
            return self.slope
        exact = scale * np.cosh(self._products * scale / softcap) ** -2
        of_others = np.divide(
            self.slope, exact, out=np.ones_like(exact), where=np.abs(exact) > 1e-6 * abs(scale)
        )
        tanh = np.tanh(products * np.float32(scale / softcap))
        return scale * (1 - tanh * tanh) * of_others


def _difference(ahead: np.ndarray, back: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        found = (ahead - back) / (2 * STEP)
    return np.where(np.isfinite(found), found, 0)


def _differentiated(
    scores: _Scores,
    arrays: Sequence[np.ndarray],
    rounded: Any = lambda x: x,
    way: str = "apart",
    from_results: bool = False,
) -> dict[str, np.ndarray]:
    """Return all gradients, naively, in the precision of the arrays and rounded between steps.

    `arrays` are dout, q, k and v. From all weights, or `from_results`: from the log-sum-exp and the
    result of the forward pass.
    """
    dout, q, k, v = arrays
    product, number = partial(_of_group, way=way), q.dtype.type
    sinks = None if scores.sinks is None else scores.sinks.astype(q.dtype)[:, None, None]
    products = rounded(product(q, k.swapaxes(-1, -2)))
    p, lse = formula.softmax(np, scores.of(products), sinks)
    lse = np.where(lse == -np.inf, 0, lse)[..., None].astype(q.dtype)
    if from_results:
        weights, p = p, np.exp(scores.of(products) - lse)
    keep = number(1) if scores.keep is None else scores.keep.astype(q.dtype)
    dP = rounded(product(dout, v.swapaxes(-1, -2))) * keep
    if from_results:
        delta = (dout * rounded(product(rounded(weights * keep), v))).sum(axis=-1, keepdims=True)
    else:
        delta = (p * dP).sum(axis=-1, keepdims=True)
    dS = p * (dP - delta)
    found = {}
    if scores.slope_of_bias is not None:
        dB = rounded(dS * scores.slope_of_bias.astype(q.dtype))
        found["bias"] = _summed(dB, scores.options["bias"].shape)
    if sinks is not None:
        of_rows = np.exp(sinks - lse) * delta
        found["sinks"] = -of_rows.sum(axis=(0, 2, 3))
    slope = scores.slope if q.dtype == np.float64 else scores.naive_slope(products)
    dX = rounded(dS * slope.astype(q.dtype))
    found["q"] = rounded(product(dX, k))
    found["k"] = _by_keys(dX, q, k.shape[1], rounded, way)
    found["v"] = _by_keys(rounded(p * keep), dout, k.shape[1], rounded, way)
    return found


def _by_keys(
    weights: np.ndarray, x: np.ndarray, heads_kv: int, rounded: Any, way: str
) -> np.ndarray:
    """Return weights^T x, summed over the heads of a group: `stacked`, within the product."""
    if way == "stacked":
        rows = weights.shape[1] // max(1, heads_kv) * weights.shape[2]
        of_group = (y.reshape(y.shape[0], heads_kv, rows, y.shape[3]) for y in (weights, x))
        stacked_weights, stacked_x = of_group
        return rounded(stacked_weights.swapaxes(-1, -2) @ stacked_x)
    by_head = rounded(_of_group(weights.swapaxes(-1, -2), x, way))
    b, hq, n, d = by_head.shape
    return by_head.reshape(b, heads_kv, hq // max(1, heads_kv), n, d).sum(axis=2)


class ExpectedGradients:
    """The gradients that results are held to.

    Parameters
    ----------
    dout, q, k, v : ndarray
        In (batch, heads, seq, dim) order.
    **score
        As given to `attention`, and `keep` as in `reference.oracle`.

    Attributes
    ----------
    exact : dict
        The gradients in float64, by name.
    """

    def __init__(
        self, dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **score: Any
    ) -> None:
        scores = _Scores(q, k, **score)
        arrays = dout, q, k, v
        self.exact = _differentiated(scores, [x.astype(np.float64) for x in arrays])
        rounded = partial(_rounded, dtype=q.dtype)
        self._dtypes = dict.fromkeys("qkv", q.dtype) | {"sinks": DTYPES["float32"]}
        if score.get("bias") is not None:
            self._dtypes["bias"] = score["bias"].dtype
        single = [rounded(x) for x in arrays]
        ways = [("apart", False), ("apart", True)]
        ways += [("stacked", False), ("in turn", True)] if q.dtype == np.float32 else []
        self._twins = [_differentiated(scores, single, rounded, *way) for way in ways]

    def bounds(self, name: str) -> np.ndarray:
        """Return the largest error that is accepted of each head of an array, or of all of it.

        For few numbers the largest error is a matter of chance: there it is that of all heads, and
        more.
        """
        exact, dtype = self.exact[name], self._dtypes[name]
        rounded = partial(_rounded, dtype=dtype)
        found = []
        for head in self._heads(name):
            of_head = exact[head]
            naive = max(_largest_error(rounded(twin[name][head]), of_head) for twin in self._twins)
            noise = formula.rounding_noise(rounded(of_head.astype(np.float32)), rounded)
            found.append(2 * naive + 2 * noise)
        bounds = np.array(found)
        if exact.size <= FEW:
            bounds[...] = bounds.max(initial=0) * (2 if dtype == np.float32 else 1.5)
        return bounds

    def _heads(self, name: str) -> list[Any]:
        if name not in "qkv":
            return [...]
        return [(slice(None), head) for head in range(self.exact[name].shape[1])]

    def assert_accepts(
        self, found: Found, what: str = "", bounds: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Assert that gradients are as accurate as the rule asks, head by head.

        Parameters
        ----------
        found : mapping
        what : str
            Names the case when it fails.
        bounds : mapping, optional
            In place of its own: of few numbers the largest error is a matter of chance.
        """
        for name, gradient in found.items():
            array, exact = to_host(gradient), self.exact[name]
            assert array.dtype == self._dtypes[name], f"{what}: d{name} is {array.dtype}"
            assert array.shape == exact.shape, f"{what}: d{name} is {array.shape}"
            its = self.bounds(name) if bounds is None else bounds[name]
            for head, bound in zip(self._heads(name), its, strict=True):
                error = _largest_error(array[head].astype(np.float64), exact[head])
                # False for NaN.
                assert error <= bound, f"{what}: d{name}{head}: {error:.3g} exceeds {bound:.3g}"
