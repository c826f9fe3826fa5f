"""The backward pass on NumPy arrays: scores again, tile by tile, from the log-sum-exp.

The algorithm of the CUDA kernels. A tile of keys stays, with its gradients of K and V, while the
tiles of queries pass by; those of Q are added up in float32. No more than one tile of scores exists
at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import numbers, of_heads, plan
from cufa.cpu.functions import NO_FUNCTIONS, Functions
from cufa.cpu.kv import Dense
from cufa.cpu.score import Score
from cufa.cpu.seen import Seen, product
from cufa.cpu.softmax import OnlineSoftmax
from cufa.cpu.spans import spans
from cufa.features.dropout import Dropout
from cufa.problem.parse_backward import Gradients, Results
from cufa.problem.problem import Problem

_FLOAT32 = np.dtype(np.float32)
_ALL = slice(None), slice(None)  # sequences and heads

#: Beyond this, float32 leaves less than 2^-17 of exp(lse): with scores of -1e9 nothing.
_LARGE_LSE = 128


def attention_backward(
    problem: Problem,
    operands: Operands,
    results: Results,
    into: Gradients,
    functions: Functions = NO_FUNCTIONS,
) -> None:
    """Compute the gradients of attention.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        Views as `parse` returns them, any strides.
    results : Results
    into : Gradients
        Where gradients go: those of q, k and v are written, others are added, in float32.
    functions : Functions
        The caller's functions.

    Notes
    -----
    FlashAttention-2 (Dao 2023, algorithm 2).
    """
    q, k, v, _, score_arrays, seed, *_ = operands
    if results.lse.size == 0:  # there may be heads of keys without one of queries
        for gradient in (into.k, into.v):
            if gradient is not None:
                gradient[...] = 0
        return
    if problem.of(Dropout) and "numbers" not in score_arrays:
        score_arrays = {**score_arrays, "numbers": numbers(problem.batch, problem.heads_q)}
    step = plan(problem)
    # Infinities and NaN in the inputs, and gradients too large for float16, are the caller's
    # business.
    with np.errstate(all="ignore"):
        for batch in spans(0, problem.batch, step.batch):
            for kv in spans(0, problem.heads_kv, step.heads_kv):
                heads = slice(kv.start * step.group, kv.stop * step.group)
                of_queries, of_keys = (batch, heads), (batch, kv)
                dQ = _Sum(into.q, of_queries)
                sinks = None if into.sinks is None else into.sinks[heads]
                bias = part_of(into.bias, *of_queries)
                sums = Gradients(dQ.sum, into.k, bias=bias, sinks=sinks, read=into.read)
                part_results = Results(*(x[of_queries] for x in results))
                part_arrays = score_arrays and of_heads(score_arrays, batch, heads)
                tiles = [
                    _Queries(
                        problem,
                        rows,
                        q[of_queries],
                        part_results,
                        part_arrays,
                        functions.of(batch, heads),
                        seed,
                        sums,
                    )
                    for rows in spans(0, problem.seq_q, step.rows)
                ]
                tiles_of_keys = Dense(k[of_keys], v[of_keys])
                large = [queries for queries in tiles if queries.softmax is not None]
                for keys in spans(0, problem.seq_kv if large else 0, step.keys):
                    for queries in large:
                        queries.add_up(keys, tiles_of_keys.tiles(keys)[0])
                for queries in tiles:
                    queries.begin()
                for keys in spans(0, problem.seq_kv, step.keys):
                    dK, dV = (_Sum(x, (*of_keys, keys)) for x in (into.k, into.v))
                    tK, tV = tiles_of_keys.tiles(keys)
                    for queries in tiles:
                        queries.attend(keys, tK, tV, dK.sum, dV.sum)
                    dK.write(problem.scale)
                    dV.write()
                dQ.write(problem.scale)


class _Sum:
    """A part of a gradient that is added up in float32: in its place, if that is float32.

    Attributes
    ----------
    sum : ndarray or None
        None if the gradient is not asked for.
    """

    def __init__(self, whole: np.ndarray | None, part: tuple[slice, ...]) -> None:
        self.sum: np.ndarray | None = None
        if whole is None:
            return
        self._place = whole[part]
        is_there = whole.dtype == _FLOAT32
        self.sum = self._place if is_there else np.empty(self._place.shape, np.float32)
        self.sum[...] = 0

    def write(self, factor: float = 1.0) -> None:
        """Write the sum, multiplied by a factor, to its place."""
        if self.sum is None:
            return
        if factor != 1:
            self.sum *= np.float32(factor)
        if self.sum is not self._place:
            self._place[...] = self.sum


def part_of(whole: np.ndarray | None, *part: slice) -> np.ndarray | None:
    """Return a part of a bias, or of an array of its shape: all along axes of length 1."""
    if whole is None:
        return None
    pairs = zip(part, whole.shape, strict=False)
    return whole[tuple(span if n > 1 else slice(None) for span, n in pairs)]


class _Queries:
    """A tile of queries of some heads, while tiles of keys pass by.

    Parameters
    ----------
    problem : Problem
    rows : slice
    q : ndarray, (batch, heads_q, seq_q, head_dim)
    results : Results
        The results of all queries, those of other tiles too.
    score_arrays : mapping
        Arrays of these sequences and heads that parts of the score read, by argument.
    functions : Functions
        The caller's functions, of these sequences and heads.
    seed : int
        The seed of a dropout.
    into : Gradients
        Sums for q, a bias and sinks, to which this adds.

    Attributes
    ----------
    softmax : OnlineSoftmax or None
        The sums of rows, where a log-sum-exp says too little of its weights: `add_up` is to be
        called with all keys then.
    """

    def __init__(
        self,
        problem: Problem,
        rows: slice,
        q: np.ndarray,
        results: Results,
        score_arrays: Mapping[str, np.ndarray],
        functions: Functions,
        seed: int,
        into: Gradients,
    ) -> None:
        self._problem, self._rows, self._functions, self._into = problem, rows, functions, into
        batch, heads_q = q.shape[:2]
        # The heads of a group lie below each other, so that they share one product with K.
        self._stacked = (
            batch,
            heads_q // problem.group,
            problem.group * (rows.stop - rows.start),
        )
        self._q, self._dout = q[:, :, rows], results.dout[:, :, rows]
        none = results.lse[:, :, rows, None] == -np.inf
        if none.any():  # rows that see no key, whatever the gradient of their results is
            self._dout = np.where(none, np.zeros((), self._dout.dtype), self._dout)
        self._score = Score(problem, rows, self._stacked, score_arrays, functions, seed)
        self._seen = Seen(problem, rows)
        lse = self._below(results.lse[:, :, rows, None])
        self._lse = np.where(lse == -np.inf, np.float32(0), lse)  # such a row sees no key
        self._growth: np.ndarray | None = None
        self._is_large = np.isfinite(lse) & (np.abs(lse) > _LARGE_LSE)
        self.softmax: OnlineSoftmax | None = None
        if self._is_large.any():
            self.softmax = OnlineSoftmax(self._stacked, 0, np.float32(1))
        if into.needs_scores or into.sinks is not None:
            rdO, rO = self._below(self._dout), self._below(results.out[:, :, rows])
            self._delta = np.einsum("...d,...d->...", rdO, rO)[..., None]
            if into.sinks is not None and not np.isfinite(self._delta).all():
                # Results of rows that see no key are 0, and 0 times NaN is NaN.
                sees_none = ~rO.any(axis=-1, keepdims=True)
                np.copyto(self._delta, np.float32(0), where=sees_none)

    def _below(self, x: np.ndarray) -> np.ndarray:
        """Return rows of heads, with those of a group below each other, float32."""
        part = np.asarray(x, np.float32).reshape(*self._stacked, x.shape[-1])
        return np.ascontiguousarray(part)

    def _by_head(self, x: np.ndarray) -> np.ndarray:
        """Return the opposite: (batch, heads_q, rows, ...)."""
        return x.reshape(*self._q.shape[:3], x.shape[-1])

    def add_up(self, keys: slice, tK: np.ndarray) -> None:
        """Add the weights of a tile of keys to the rows' sums."""
        if self.softmax is None or not self._sees(keys):
            return
        rS, _, unseen = self._scores(self._below(self._q), keys, tK)
        if unseen is not None:
            np.copyto(rS, -np.inf, where=unseen)
        self.softmax.weigh(rS)

    def begin(self) -> None:
        """Put the sums of large rows in the place of their log-sum-exp; add gradients of sinks."""
        sinks, dsinks = self._score.sinks(), self._into.sinks
        if self.softmax is not None:
            m, total = self.softmax.m, self.softmax.row_sum
            if sinks is not None:
                of_keys, m = m, np.maximum(m, sinks)
                total = total * np.exp(of_keys - m) + np.exp(sinks - m)
            self._lse = np.where(self._is_large, m, self._lse)
            self._growth = np.where(self._is_large, 1 / total, np.float32(1))
        if dsinks is not None and sinks is not None:
            of_rows = self._weights(sinks - self._lse) * self._delta
            dsinks -= self._by_head(of_rows).sum(axis=(0, 2, 3), dtype=np.float64)

    def _weights(self, above_lse: np.ndarray) -> np.ndarray:
        """Make scores less the log-sum-exp weights, in place."""
        np.exp(above_lse, out=above_lse)
        if self._growth is not None:
            above_lse *= self._growth
        return above_lse

    def _sees(self, keys: slice) -> bool:
        first, end = self._seen.by_any
        is_far = keys.stop <= first or end <= keys.start
        return not (is_far or self._functions.is_hidden(self._rows, keys))

    def _scores(
        self, rQ: np.ndarray, keys: slice, tK: np.ndarray
    ) -> tuple[np.ndarray, list[tuple[str, np.ndarray | None]], np.ndarray | None]:
        """Return scores of a tile, derivatives as `Score.slopes`, and where keys are unseen."""
        rS = np.matmul(rQ, tK.swapaxes(-1, -2))
        slopes = self._score.slopes(rS, np.float32(self._problem.scale), keys)
        unseen = self._score.hidden(keys)
        if not self._seen.are_seen(keys):
            unseen = self._seen.unseen(keys, unseen)
        return rS, slopes, unseen

    def attend(
        self,
        keys: slice,
        tK: np.ndarray,
        tV: np.ndarray,
        dK: np.ndarray | None,
        dV: np.ndarray | None,
    ) -> None:
        """Add the gradients of a tile of scores to all that are asked for.

        Parameters
        ----------
        keys : slice
        tK, tV : ndarray, (batch, heads_kv, keys, ...)
        dK, dV : ndarray or None
            Their gradients; those of K and Q are without the scale.
        """
        if not self._sees(keys):
            return
        dQ, dB = self._into.q, part_of(self._into.bias, *_ALL, self._rows, keys)
        needs_scores = not (dQ is dK is dB is None) or bool(self._into.read)
        if dV is None and not needs_scores:
            return
        rQ, rdO = self._below(self._q), self._below(self._dout)
        rS, slopes, unseen = self._scores(rQ, keys, tK)
        rS -= self._lse
        rP = self._weights(rS)
        if unseen is not None:
            np.copyto(rP, np.float32(0), where=unseen)  # also of a row whose LSE is NaN
        kept = self._score.kept(keys)
        if dV is not None:
            dropped = rP if kept is None else rP * kept
            dV += _by_key(dropped, rdO, unseen)
        if not needs_scores:
            return
        rdP = np.matmul(rdO, tV.swapaxes(-1, -2))
        if kept is not None:
            rdP *= kept
        rdP -= self._delta
        rdS = rP
        rdS *= rdP
        for name, slope in reversed(slopes):
            if unseen is not None and name in ("bias", "score_mod"):
                np.copyto(rdS, np.float32(0), where=unseen)
            if dB is not None and name == "bias":
                self._add_bias(dB, rdS)
            if self._into.read and name == "score_mod":
                self._score.gather(rdS, keys, self._into.read)
            if slope is not None:
                rdS *= slope
        if unseen is not None:
            np.copyto(rdS, np.float32(0), where=unseen)
        if dQ is not None:
            dQ[:, :, self._rows] += self._by_head(_product(rdS, tK, unseen))
        if dK is not None:
            dK += _by_key(rdS, rQ, unseen)

    def _add_bias(self, dB: np.ndarray, rdS: np.ndarray) -> None:
        """Add the gradient of scores to that of a bias, over the axes that it lacks."""
        by_head = self._by_head(rdS)
        pairs = zip(dB.shape, by_head.shape, strict=True)
        lacks = tuple(i for i, (n, m) in enumerate(pairs) if n == 1 < m)
        dB += by_head.sum(axis=lacks, keepdims=True)


def _product(weights: np.ndarray, values: np.ndarray, unseen: np.ndarray | None) -> np.ndarray:
    """Return weights times values, as `product` does where any key is unseen."""
    if unseen is None:
        return np.matmul(weights, values)
    return product(weights, values, lambda: unseen)


def _by_key(weights: np.ndarray, values: np.ndarray, unseen: np.ndarray | None) -> np.ndarray:
    """Return transposed weights times values of rows."""
    turned = None if unseen is None else unseen.swapaxes(-1, -2)
    return _product(weights.swapaxes(-1, -2), values, turned)
