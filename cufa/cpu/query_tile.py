"""One tile of queries on the CPU: the main loop of the algorithm, over tiles of keys."""

from __future__ import annotations

import math

import numpy as np

from cufa.cpu.kv import KV
from cufa.cpu.score import Score
from cufa.cpu.seen import Seen, product
from cufa.cpu.softmax import Fp8Softmax, OnlineSoftmax, PlainSoftmax
from cufa.cpu.spans import spans
from cufa.features.dropout import Dropout

#: In place of a scale of 0, as on the GPU: 0 times the -inf of a hidden key would be NaN.
_TINY = float(np.finfo(np.float32).tiny)

#: Below this scale, scores may be so small that the logarithm of their sum needs the maximum; above
#: 1, a scaled q may overflow.
_LEAST_SCALE = 2.0**-20

#: Rows with fewer keys get maxima: exp(score) / exp(score) of a single key is 1 with rounding.
_FEW_KEYS = 64


def query_tile(
    score: Score, columns: int, q: np.ndarray, kv: KV, out: np.ndarray, lse: np.ndarray
) -> None:
    """Attend from one tile of queries, the same positions of several heads, to all keys they see.

    Parameters
    ----------
    score : Score
        The score of the tile.
    columns : int
        Keys of a tile.
    q : ndarray, (batch, heads_q, rows, head_dim)
        The queries, of some sequences and heads.
    kv : KV
        Theirs.
    out, lse : ndarray, (batch, heads_q, rows, head_dim_v) and (batch, heads_q, rows)
        Where the result goes.

    Notes
    -----
    Rows get maxima only where they need them. Each row is judged on its own, so that its bits do
    not depend on what is computed with it.
    """
    tile = _Tile(score, columns, q, kv)
    if tile.may_be_plain:
        done = tile.attended(is_plain=True)
        acc, row_sum, log_sum = done.divided(), done.row_sum, done.log_sum
        sum_is_bad = ~done.is_exact & tile.sees_any
        is_finite = np.isfinite(acc)
        if sum_is_bad.any() or not is_finite.all():
            is_bad = sum_is_bad | ~is_finite.all(axis=-1, keepdims=True)
            online = tile.attended(is_plain=False)
            np.copyto(acc, online.divided(), where=is_bad)
            np.copyto(row_sum, online.row_sum, where=sum_is_bad)
            np.copyto(log_sum, online.log_sum, where=sum_is_bad)
    else:
        done = tile.attended(is_plain=False)
        acc, row_sum, log_sum = done.divided(), done.row_sum, done.log_sum
    dropout = score.problem.of(Dropout)
    if dropout is not None:
        acc /= np.float32(dropout.keep)
    sinks = score.sinks()
    if sinks is not None:
        # The keys' share of the sum, by the distance to the sink: large logarithms are rounded.
        acc *= np.where(row_sum == 0, np.float32(1), 1 / (1 + np.exp(sinks - log_sum)))
        log_sum = np.logaddexp(log_sum, sinks)
    out[...] = acc.reshape(out.shape)
    lse[...] = log_sum.reshape(lse.shape)


class _Tile:
    """The sums of `query_tile`, once without row maxima and, where needed, once with them.

    Attributes
    ----------
    sees_any : ndarray of bool, broadcasts with (batch, heads_kv, rows of a group, 1)
        Whether a row has seen a key.
    """

    def __init__(self, score: Score, columns: int, q: np.ndarray, kv: KV) -> None:
        self._score, self._columns, self._q, self._kv = score, columns, q, kv
        self._problem, self._stacked = problem, stacked = score.problem, score.stacked
        self._is_fp8 = problem.precision == "fp8"
        # The heads of a group lie below each other, so that they share one product with K.
        self._by_position = (*stacked[:2], problem.group, q.shape[2])
        self._seen = Seen(problem, score.rows)
        self._first, self._end = self._seen.first, self._seen.end
        self.sees_any = np.zeros((*stacked, 1), bool)
        self._all_see_any = False
        self._buffer = np.empty(columns * math.prod(stacked), np.float32)
        self._product = np.empty((*stacked, problem.head_dim_v), np.float32)

    @property
    def may_be_plain(self) -> bool:
        """Whether scores in natural units are as exact as differences of scores."""
        many = self._seen.fewest >= _FEW_KEYS and not self._is_fp8
        return many and _LEAST_SCALE <= abs(self._problem.scale) <= 1

    def attended(self, is_plain: bool) -> PlainSoftmax:
        """Return sums over all keys that the rows see."""
        p, score = self._problem, self._score
        scale = np.float32(max(abs(p.scale), _TINY))
        rQ = np.array(self._q, dtype=np.float32, order="C").reshape(*self._stacked, p.head_dim)
        if p.scale < 0:
            rQ *= np.float32(-1)  # the largest product shall be the largest score
        softmax: PlainSoftmax
        factor = np.float32(1)  # of the products, unless `score` scales them
        if is_plain:
            softmax = PlainSoftmax(self._stacked, p.head_dim_v)
            if score.is_more_than_scaled or math.frexp(scale)[0] != 0.5:
                factor = scale
            else:  # a power of two leaves q exact
                rQ *= scale
        else:
            remains = np.float32(1) if score.is_more_than_scaled else scale
            kind = Fp8Softmax if self._is_fp8 else OnlineSoftmax
            softmax = kind(self._stacked, p.head_dim_v, remains)
        tiles = list(spans(*self._seen.by_any, self._columns))
        if self._is_fp8:
            tiles.reverse()  # the first keys often weigh most: others would lose bits next to them
        for keys in tiles:
            if score.functions.is_hidden(score.rows, keys):
                continue
            tK, tV = self._kv.tiles(keys)
            shape = (*self._stacked, keys.stop - keys.start)
            rS = self._buffer[: math.prod(shape)].reshape(shape)
            np.matmul(rQ, tK.swapaxes(-1, -2), out=rS)
            if score.is_more_than_scaled:
                score.apply(rS, scale, keys)
            elif factor != 1:
                rS *= factor
            hidden = score.hidden(keys)
            self._hide(rS, keys, hidden)
            softmax.weigh(rS)
            score.drop(rS, keys)
            if keys is tiles[0]:
                self._times_values(rS, tV, keys, hidden, softmax.acc)
            else:
                softmax.acc += self._times_values(rS, tV, keys, hidden, self._product)
        return softmax

    def _hide(self, rS: np.ndarray, keys: slice, hidden: np.ndarray | None) -> None:
        """Put -inf where a row does not see a key, by `hidden` or by its position."""
        if hidden is not None:
            np.copyto(rS, -np.inf, where=hidden)
        first, end = self._seen.by_all
        if keys.stop > end:
            j = np.arange(max(keys.start, end), keys.stop)
            part = rS.reshape(*self._by_position, -1)[..., -len(j) :]
            np.copyto(part, -np.inf, where=j >= self._end[:, None])
        if keys.start < first:
            j = np.arange(keys.start, min(keys.stop, first))
            part = rS.reshape(*self._by_position, -1)[..., : len(j)]
            np.copyto(part, -np.inf, where=j < self._first[:, None])
        if self._all_see_any:
            return
        if hidden is None and first <= keys.start < end:
            self.sees_any[...] = self._all_see_any = True
            return
        if hidden is None:
            sees = np.minimum(self._end, keys.stop) > np.maximum(self._first, keys.start)
            self.sees_any |= np.tile(sees, self._problem.group)[:, None]
        else:
            unseen = self._seen.unseen(keys, hidden)
            self.sees_any |= ~unseen.all(axis=-1, keepdims=True)
        self._all_see_any = bool(self.sees_any.all())

    def _times_values(
        self,
        rP: np.ndarray,
        tV: np.ndarray,
        keys: slice,
        hidden: np.ndarray | None,
        out: np.ndarray,
    ) -> np.ndarray:
        """Compute P V where P is 0 at hidden places, also if V is infinite or NaN there."""
        if hidden is None and self._seen.are_seen(keys):
            return np.matmul(rP, tV, out=out)
        return product(rP, tV, lambda: self._seen.unseen(keys, hidden), out)
