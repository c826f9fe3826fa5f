"""The judge of gradients: float64, within bounds that a naive formula sets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.explorer import oracle
from cufa.explorer.formula import scores_of, softmax
from cufa.explorer.score_inputs import Head, ScoreInputs
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
        self._heads = oracle.sampled_heads(problem.batch, problem.heads_kv, 2)
        rounded = oracle.rounding(arrays[1].dtype)
        self._right: list[tuple[Array, ...]] = []
        self._bounds = [0.0, 0.0, 0.0]
        for b, h in self._heads:
            part = [self._part(array, b, h) for array in arrays]
            exact = self._differentiated(b, h, [x.astype(np.float64) for x in part], lambda x: x)
            naive = self._differentiated(b, h, part, rounded)
            for i, (right, near) in enumerate(zip(exact, naive, strict=True)):
                self._bounds[i] = max(self._bounds[i], oracle.allowed(xp, right, near, rounded))
            self._right.append(exact)

    def judge(self, *results: Any) -> oracle.Verdict:
        """Compare dq, dk and dv, which are contiguous."""
        xp, errors = self._xp, [0.0, 0.0, 0.0]
        for (b, h), exact in zip(self._heads, self._right, strict=True):
            for i, (array, right) in enumerate(zip(results, exact, strict=True)):
                error = float(xp.abs(self._part(array, b, h) - right).max())
                errors[i] = max(errors[i], error)
        worst = max(errors)
        for name, array, error, bound in zip(TENSORS, results, errors, self._bounds, strict=True):
            if not oracle.is_finite(xp, array):
                return oracle.Verdict(worst, f"d{name} holds values that are not finite")
            if not error <= bound:
                return oracle.Verdict(worst, f"d{name}: error {error:.2g} exceeds {bound:.2g}")
        return oracle.Verdict(worst, None)

    def _part(self, array: Array, b: int, h: int) -> Array:
        """Return float32 of a K/V head, or of the query heads that share it."""
        share = array.shape[1] // self._problem.heads_kv
        return array[b, h * share : (h + 1) * share].astype(np.float32)

    def _differentiated(
        self, b: int, h: int, arrays: list[Array], rounded: Any
    ) -> tuple[Array, Array, Array]:
        """Return dq, dk and dv of a K/V head, in the precision of the arrays."""
        xp, p = self._xp, self._problem
        dout, q, k, v = arrays
        k, v = k[0], v[0]
        # A naive float32 product adds term by term.
        step = 1 if p.dtype == "float32" and q.dtype == np.float32 else 128
        times = partial(oracle.product, xp, step=step)
        chunk = max(1, oracle.CHUNK_BYTES // (8 * p.seq_kv))
        dq, dk, dv = xp.zeros_like(q), xp.zeros_like(k), xp.zeros_like(v)
        for each, i in itertools.product(range(p.group), range(0, p.seq_q, chunk)):
            head = Head(xp, p, self._inputs, b, h * p.group + each)
            rows = slice(i, i + chunk)
            options = head.options(xp.arange(p.seq_q)[rows])
            sink, keep = options.pop("sinks", None), options.pop("keep")
            scores: Callable[[Array], Array] = partial(scores_of, xp, **options)
            some, of_result = q[each, rows], dout[each, rows]
            products = rounded(times(some, k.T))
            _, lse = softmax(xp, scores(products.copy()), sink)
            lse = xp.where(lse == -np.inf, 0, lse).astype(products.dtype)
            # As the backward pass has them.
            weights = xp.exp(scores(products.copy()) - lse[:, None])
            factors = 1 if keep is None else keep
            kept_ones = rounded(weights * factors)
            d_p = rounded(times(of_result, v.T)) * factors
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
