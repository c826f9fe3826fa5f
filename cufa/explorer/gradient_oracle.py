"""The judge of gradients: float64, within bounds that a naive formula sets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.explorer.formula import rounding_noise, scores_of, softmax
from cufa.explorer.oracle import CHUNK_BYTES, Verdict, is_finite, product, sampled_heads
from cufa.explorer.score_inputs import ScoreInputs
from cufa.features.dropout import Dropout, kept
from cufa.features.feature import Places
from cufa.problem.extras import all_axes
from cufa.problem.parse_backward import TENSORS
from cufa.problem.problem import Problem

_STEP = 2.0**-16
"""Step of differences in float64."""


class GradientOracle:
    """Judges gradients of one problem, of the first and the last head of K and V.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    problem : Problem
    arrays : tuple of array
        dout, q, k and v, (batch, heads, seq, head_dim).
    inputs : ScoreInputs
        Arrays next to these; it has no functions.
    """

    def __init__(
        self, xp: Any, problem: Problem, arrays: tuple[Array, ...], inputs: ScoreInputs
    ) -> None:
        self._xp, self._problem, self._inputs = xp, problem, inputs
        self._heads = sampled_heads(problem.batch, problem.heads_kv, 2)
        dtype = arrays[1].dtype

        def rounded(x: Any) -> Any:
            return x.astype(dtype).astype(np.float32)

        self._right: list[tuple[Array, ...]] = []
        bounds = []
        for b, h in self._heads:
            part = self._of_heads(arrays, b, h)
            exact = self._differentiated(b, h, [x.astype(np.float64) for x in part], lambda x: x)
            naive = self._differentiated(b, h, part, rounded)
            self._right.append(exact)
            bounds.append([self._bound(*pair, rounded) for pair in zip(exact, naive, strict=True)])
        self._bounds = [max(each) for each in zip(*bounds, strict=True)]

    def judge(self, *results: Any) -> Verdict:
        """Compare dq, dk and dv, which are contiguous."""
        xp, errors = self._xp, [0.0, 0.0, 0.0]
        for (b, h), exact in zip(self._heads, self._right, strict=True):
            part = self._of_heads((results[0], *results), b, h)[1:]
            for i, (found, right) in enumerate(zip(part, exact, strict=True)):
                errors[i] = max(errors[i], float(xp.abs(found - right).max()))
        for name, array, error, bound in zip(TENSORS, results, errors, self._bounds, strict=True):
            if not is_finite(xp, array):
                return Verdict(max(errors), f"d{name} holds values that are not finite")
            if not error <= bound:
                return Verdict(max(errors), f"d{name}: error {error:.2g} exceeds {bound:.2g}")
        return Verdict(max(errors), None)

    def _of_heads(self, arrays: tuple[Array, ...], b: int, h: int) -> list[Array]:
        """Return float32 of dout and q for the query heads of a K/V head, and of its k and v."""
        group = self._problem.group
        queries = slice(h * group, (h + 1) * group)
        places = (queries, queries, slice(h, h + 1), slice(h, h + 1))
        pairs = zip(arrays, places, strict=True)
        return [array[b, part].astype(np.float32) for array, part in pairs]

    def _bound(self, exact: Array, naive: Array, rounded: Any) -> float:
        error = float(self._xp.abs(naive - exact).max())
        return 2 * error + 2 * rounding_noise(rounded(exact.astype(np.float32)), rounded)

    def _differentiated(
        self, b: int, h: int, arrays: list[Array], rounded: Any
    ) -> tuple[Array, Array, Array]:
        """Return dq, dk and dv of a K/V head, in the precision of the arrays."""
        xp, p = self._xp, self._problem
        dout, q, k, v = arrays
        k, v = k[0], v[0]
        # A naive float32 product adds term by term.
        step = 1 if p.dtype == "float32" and q.dtype == np.float32 else 128

        def times(x: Array, y: Array) -> Array:
            return product(xp, x[None], y[None], step)[0]

        dq, dk, dv = xp.zeros_like(q), xp.zeros_like(k), xp.zeros_like(v)
        for each, rows in self._parts():
            head = h * p.group + each
            scores = partial(self._scores, b, head, rows)
            some, of_result = q[each, rows], dout[each, rows]
            products = rounded(times(some, k.T))
            keep = self._keep(b, head, rows)
            _, lse = softmax(xp, scores(products), self._sink(b, head, products.dtype))
            lse = xp.where(lse == -np.inf, 0, lse).astype(products.dtype)
            weights = xp.exp(scores(products) - lse[:, None])  # as the backward pass has them
            kept_ones = rounded(weights * keep)
            d_p = rounded(times(of_result, v.T)) * keep
            delta = (of_result * rounded(times(kept_ones, v))).sum(axis=-1, keepdims=True)
            d_s = weights * (d_p - delta)
            wide = products.astype(np.float64)
            with np.errstate(invalid="ignore"):
                slope = (scores(wide + _STEP) - scores(wide - _STEP)) / (2 * _STEP)
            slope = xp.where(xp.isfinite(slope), slope, 0).astype(products.dtype)
            d_x = rounded(d_s * slope)
            dq[each, rows] = times(d_x, k)
            dk += times(d_x.T, some)
            dv += times(kept_ones.T, of_result)
        return rounded(dq), rounded(dk[None]), rounded(dv[None])

    def _parts(self) -> Iterator[tuple[int, slice]]:
        """Yield query heads of the group, and some of their rows."""
        p = self._problem
        step = max(1, CHUNK_BYTES // (8 * p.seq_kv))
        return itertools.product(
            range(p.group), (slice(i, min(p.seq_q, i + step)) for i in range(0, p.seq_q, step))
        )

    def _scores(self, b: int, h: int, rows: slice, products: Array) -> Array:
        xp, p = self._xp, self._problem
        score = p.asked
        for name, array in self._inputs.arrays.items():
            if name == "sinks":
                continue
            x = all_axes(name, array, self._inputs.ndim, p.sizes, xp)
            kind = x.dtype if x.dtype in (np.bool_, np.uint8) else products.dtype
            score[name] = self._of_head(x, b, h) if x.ndim < 3 else x[b, h, rows].astype(kind)
        at = Places(
            b,
            h,
            xp.arange(rows.start, rows.stop)[:, None],
            xp.arange(p.seq_kv),
            *(p.seq_q, p.seq_kv),
        )
        return scores_of(xp, products.copy(), at, scale=p.scale, **score)

    def _of_head(self, array: Array, b: int, h: int) -> Array:
        return array[h] if array.ndim == 1 else array[b, h]

    def _sink(self, b: int, h: int, dtype: Any) -> Array | None:
        sinks = self._inputs.arrays.get("sinks")
        return None if sinks is None else self._of_head(sinks, b, h).astype(dtype)

    def _keep(self, b: int, h: int, rows: slice) -> Any:
        """Return the factors of the weights under dropout; 1 without."""
        xp, dropout = self._xp, self._problem.of(Dropout)
        if dropout is None:
            return 1
        at = xp.asarray([b]), xp.asarray([h]), xp.arange(rows.start, rows.stop)
        keys = slice(0, self._problem.seq_kv)
        return kept(dropout.p, self._inputs.seed, *at, keys, xp)[0, 0] / dropout.keep
