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
from cufa.explorer.inputs import Inputs, head_options
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
    dout : array, (batch, heads, seq, head_dim_v)
    inputs : Inputs
        Without functions.
    """

    def __init__(self, xp: Any, problem: Problem, dout: Array, inputs: Inputs) -> None:
        self._xp, self._problem, self._inputs = xp, problem, inputs
        self._heads = oracle.sampled_heads(problem.batch, problem.heads_kv, 2)
        rounded = oracle.rounding(dout.dtype)
        parts = [self._sample(array) for array in (dout, *inputs.tensors)]
        wide = (part.astype(np.float64) for part in parts)
        self._right = self._differentiated(*wide, rounded=lambda x: x)
        naive = self._differentiated(*parts, rounded=rounded)
        allowed = partial(oracle.allowed, xp, rounded=rounded)
        self._bounds = list(map(allowed, self._right, naive))

    def judge(self, *results: Any) -> oracle.Verdict:
        """Compare dq, dk and dv, which are contiguous."""
        xp, pairs = self._xp, zip(results, self._right, strict=True)
        errors = [float(xp.abs(self._sample(array) - right).max()) for array, right in pairs]
        names = [f"d{name}" for name in TENSORS]
        complaints = map(partial(oracle.complaint, xp), results, errors, self._bounds, names)
        return oracle.Verdict(max(errors), next(filter(None, complaints), None))

    def _sample(self, array: Array) -> Array:
        """Return float32 of the checked K/V heads, each with the query heads that share it."""
        by_head = array.reshape(len(array), self._problem.heads_kv, -1, *array.shape[2:])
        return self._xp.stack([by_head[place].astype(np.float32) for place in self._heads])

    def _differentiated(self, *arrays: Array, rounded: Any) -> tuple[Array, Array, Array]:
        """Return dq, dk and dv of the checked heads, in the precision of the arrays."""
        xp, p = self._xp, self._problem
        dout, q, k, v = arrays
        # A naive float32 product adds term by term.
        step = 1 if p.dtype == "float32" and q.dtype == np.float32 else 128
        times = partial(oracle.product, xp, step=step)
        chunk = max(1, oracle.CHUNK_BYTES // (8 * p.seq_kv))
        dq, dk, dv = map(xp.zeros_like, (q, k, v))
        places = itertools.product(range(len(q)), range(p.group), range(0, p.seq_q, chunk))
        for n, each, i in places:
            b, h = self._heads[n]
            rows, place = slice(i, i + chunk), (b, h * p.group + each)
            options = head_options(xp, p, self._inputs, place, xp.arange(p.seq_q)[rows])
            sink, keep = options.pop("sinks", None), options.pop("keep")
            scores: Callable[[Array], Array] = partial(scores_of, xp, **options)
            some, of_result = q[n, each, rows], dout[n, each, rows]
            keys, values = k[n, 0], v[n, 0]
            products = rounded(times(some, keys.T))
            _, lse = softmax(xp, scores(products.copy()), sink)
            lse = xp.where(lse == -np.inf, 0, lse).astype(products.dtype)
            # As the backward pass has them.
            weights = xp.exp(scores(products.copy()) - lse[:, None])
            factors = 1 if keep is None else keep
            kept_ones = rounded(weights * factors)
            d_p = rounded(times(of_result, values.T)) * factors
            delta = (of_result * rounded(times(kept_ones, values))).sum(axis=-1, keepdims=True)
            d_s = weights * (d_p - delta)
            wide = products.astype(np.float64)
            with np.errstate(invalid="ignore"):
                slope = (scores(wide + _STEP) - scores(wide - _STEP)) / (2 * _STEP)
            slope = xp.where(xp.isfinite(slope), slope, 0).astype(products.dtype)
            d_x = rounded(d_s * slope)
            dq[n, each, rows] = times(d_x, keys)
            dk[n, 0] += times(d_x.T, some)
            dv[n, 0] += times(kept_ones.T, of_result)
        return rounded(dq), rounded(dk), rounded(dv)
