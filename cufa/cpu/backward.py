"""The backward pass on NumPy arrays: scores again, tile by tile, from the log-sum-exp.

The algorithm of the CUDA kernels. A tile of keys stays while the tiles of queries pass by;
gradients are added up in float32. No more than one tile of scores exists at a time.
"""

from __future__ import annotations

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import Step, steps
from cufa.cpu.functions import Functions
from cufa.cpu.kv import KV
from cufa.cpu.score import Score, Slopes
from cufa.cpu.softmax import OnlineSoftmax
from cufa.cpu.spans import part_of, spans
from cufa.problem.parse_backward import Gradients, Results
from cufa.problem.problem import Problem

#: Beyond this, float32 leaves less than 2^-17 of exp(lse): with scores of -1e9 nothing.
_LARGE_LSE = 128


def attention_backward(
    problem: Problem,
    operands: Operands,
    results: Results,
    into: Gradients,
    functions: Functions,
) -> None:
    """Compute the gradients of attention.

    Parameters
    ----------
    problem, operands, functions
        As in `cufa.cpu.attention.attention`.
    results : Results
    into : Gradients
        Where gradients go: those of q, k and v are written, others are added, in float32. For
        "Varlen", the first axis of all but a bias has length 1. Gradients of rows that no sequence
        has, or beyond a length, are 0.

    Notes
    -----
    FlashAttention-2 (Dao 2023, algorithm 2).
    """
    for gradient in into[:3]:
        if gradient is not None:
            gradient[...] = 0
    # Infinities and NaN in the inputs, and gradients too large for float16, are the caller's
    # business.
    with np.errstate(all="ignore"):
        for step in steps(problem, operands, functions):
            _differentiate(step, problem, operands, results, into)


def _differentiate(
    step: Step, problem: Problem, operands: Operands, results: Results, into: Gradients
) -> None:
    """Compute the gradients of a step."""
    views = step.of_queries, step.of_keys, step.of_keys
    q, k, v = (view(x) for view, x in zip(views, operands[:3], strict=True))
    places = [x if x is None else view(x) for view, x in zip(views, into[:3], strict=True)]
    dq, dk, dv = totals = [_sum(place) for place in places]
    sinks = None if into.sinks is None else into.sinks[step.heads]
    bias = None if into.bias is None else part_of(into.bias, step.numbers, step.heads)
    sums = Gradients(dq, dk, dv, bias, sinks, into.read)
    of_step = Results(*map(step.of_queries, results))
    queries = [_Queries(score, q, of_step, sums) for score in step.scores]
    kv, tiles = KV(k, v), list(spans(0, k.shape[2], step.columns))
    large = [each for each in queries if each.softmax is not None]
    for keys in tiles if large else ():
        tK = kv.tiles(keys)[0]
        for each in large:
            each.add_up(keys, tK)
    for each in queries:
        each.begin()
    for keys in tiles:
        tK, tV = kv.tiles(keys)
        for each in queries:
            each.attend(keys, tK, tV)
    for place, total, factor in zip(places, totals, (problem.scale, problem.scale, 1), strict=True):
        if place is not None and total is not None:
            np.multiply(total, np.float32(factor), out=place, casting="unsafe")


def _sum(place: np.ndarray | None) -> np.ndarray | None:
    """Return where a gradient is added up in float32: its place, of zeros, if that is float32."""
    if place is None or place.dtype == np.float32:
        return place
    return np.zeros(place.shape, np.float32)


class _Queries:
    """A tile of queries of some heads, while tiles of keys pass by.

    Parameters
    ----------
    score : Score
    q : ndarray, (batch, heads_q, seq_q, head_dim)
    results : Results
        The results of all queries, those of other tiles too.
    into : Gradients
        Sums to which this adds, of these sequences and heads; those of q and k are without the
        scale.

    Attributes
    ----------
    softmax : OnlineSoftmax or None
        The sums of rows, where a log-sum-exp says too little of its weights: `add_up` is to be
        called with all keys then.
    """

    def __init__(self, score: Score, q: np.ndarray, results: Results, into: Gradients) -> None:
        self._score, self._into = score, into
        dout, out, lse = (x[:, :, score.rows] for x in results)
        lse = lse[..., None]
        sees_none = lse == -np.inf  # such rows have no gradient, whatever that of their results is
        self._lse = score.stack(np.where(sees_none, np.float32(0), lse))
        self._rQ = score.stack(q[:, :, score.rows])
        self._rdO = score.stack(np.where(sees_none, np.zeros((), dout.dtype), dout))
        self._growth: np.ndarray | None = None
        self._is_large = np.isfinite(self._lse) & (np.abs(self._lse) > _LARGE_LSE)
        is_any = self._is_large.any()
        self.softmax = OnlineSoftmax(score.stacked, 0, np.float32(1)) if is_any else None
        rO = score.stack(out)
        # In float32, as dP: the errors of both cancel in rows of one large weight.
        self._delta = np.einsum("...d,...d->...", self._rdO, rO)[..., None]
        if into.sinks is not None:
            exact = np.einsum("...d,...d->...", self._rdO, rO, dtype=np.float64)[..., None]
            # Results of rows that see no key are 0, and 0 times NaN is NaN.
            self._delta_of_sink = np.where(rO.any(axis=-1, keepdims=True), exact, 0)

    def add_up(self, keys: slice, tK: np.ndarray) -> None:
        """Add the weights of a tile of keys to the rows' sums."""
        if self.softmax is not None and self._score.sees(keys):
            rS, _, hidden = self._scores(keys, tK)
            self._score.hide(self._score.unstack(rS), -np.inf, keys, hidden)
            self.softmax.weigh(rS)

    def begin(self) -> None:
        """Put the sums of large rows in the place of their log-sum-exp; add gradients of sinks."""
        score, dsinks, sinks = self._score, self._into.sinks, self._score.sinks
        if sinks is not None:
            sinks = score.stack(np.broadcast_to(sinks, (*score.by_head, 1))).astype(np.float64)
        if self.softmax is not None:
            m, total = self.softmax.m, self.softmax.row_sum
            if sinks is not None:
                of_keys, m = m, np.maximum(m, sinks)
                total = total * np.exp(of_keys - m) + np.exp(sinks - m)
            self._lse = np.where(self._is_large, m, self._lse)
            self._growth = np.where(self._is_large, 1 / total, np.float32(1))
        if dsinks is not None and sinks is not None:
            of_rows = self._weights(sinks - self._lse) * self._delta_of_sink
            dsinks -= score.unstack(of_rows).sum(axis=(0, 2, 3))

    def _weights(self, above_lse: np.ndarray) -> np.ndarray:
        """Make scores less the log-sum-exp weights, in place."""
        np.exp(above_lse, out=above_lse)
        if self._growth is not None:
            above_lse *= self._growth
        return above_lse

    def _scores(self, keys: slice, tK: np.ndarray) -> tuple[np.ndarray, Slopes, np.ndarray | None]:
        """Return scores of a tile, the derivatives that features have, and `Score.hidden`."""
        rS = np.matmul(self._rQ, tK.swapaxes(-1, -2))
        slopes: Slopes = []
        scale = np.float32(self._score.problem.scale)
        self._score.apply(self._score.unstack(rS), scale, keys, slopes)
        return rS, slopes, self._score.hidden(keys)

    def attend(self, keys: slice, tK: np.ndarray, tV: np.ndarray) -> None:
        """Add the gradients of a tile of scores to all that are asked for.

        Parameters
        ----------
        keys : slice
        tK, tV : ndarray, (batch, heads_kv, keys, ...)
        """
        score, into = self._score, self._into
        if not score.sees(keys) or (into.v is None and not into.needs_scores):
            return
        rS, slopes, hidden = self._scores(keys, tK)
        rS -= self._lse
        rP, by_head = self._weights(rS), score.unstack(rS)
        score.hide(by_head, 0, keys, hidden)  # also of a row whose LSE is NaN
        kept = score.kept(keys)
        if into.v is not None:
            dropped = rP if kept is None else rP * kept.reshape(rP.shape)
            into.v[:, :, keys] += score.product(dropped, self._rdO, keys, hidden, by_key=True)
        if not into.needs_scores:
            return
        rdP = np.matmul(self._rdO, tV.swapaxes(-1, -2))
        if kept is not None:
            rdP *= kept.reshape(rP.shape)
        rdP -= self._delta
        rdS = rP
        rdS *= rdP
        score.hide(by_head, 0, keys, hidden)
        for name, slope in reversed(slopes):
            if name == "bias" and into.bias is not None:
                everything = slice(None), slice(None)
                _add(part_of(into.bias, *everything, score.rows, keys), by_head)
            if name == "score_mod" and into.read:
                score.gather(by_head, keys, into.read)
            if slope is not None:
                by_head *= slope
                score.hide(by_head, 0, keys, hidden)
        if into.q is not None:
            dQ = score.product(rdS, tK, keys, hidden)
            into.q[:, :, score.rows] += score.unstack(dQ)
        if into.k is not None:
            into.k[:, :, keys] += score.product(rdS, self._rQ, keys, hidden, by_key=True)


def _add(dB: np.ndarray, dS: np.ndarray) -> None:
    """Add the gradient of scores to that of a bias, over the axes that it lacks."""
    lacks = tuple(i for i, (n, m) in enumerate(zip(dB.shape, dS.shape, strict=True)) if n == 1 < m)
    dB += dS.sum(axis=lacks, keepdims=True)
