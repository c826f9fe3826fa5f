"""One tile of queries on the CPU: the main loop of the algorithm, over tiles of keys."""

from __future__ import annotations

import math

import numpy as np

from cufa.cpu.kv import KV
from cufa.cpu.score import Score
from cufa.cpu.softmax import Fp8Softmax, OnlineSoftmax, PlainSoftmax
from cufa.cpu.spans import spans

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
    problem, tiles = score.problem, list(filter(score.sees, spans(*score.by_any, columns)))
    is_fp8 = problem.precision == "fp8"
    if is_fp8:
        tiles.reverse()  # the first keys often weigh most: others would lose bits next to them
    may_be_plain = (
        score.fewest >= _FEW_KEYS and not is_fp8 and _LEAST_SCALE <= abs(problem.scale) <= 1
    )
    done = _attended(score, tiles, q, kv, may_be_plain)
    acc, row_sum, log_sum = done.divided(), done.row_sum, done.log_sum
    if may_be_plain:
        sum_is_bad, is_finite = ~done.is_exact, np.isfinite(acc)
        if sum_is_bad.any():
            sum_is_bad &= _sees_any(score, tiles).reshape(row_sum.shape)
        if sum_is_bad.any() or not is_finite.all():
            is_bad = sum_is_bad | ~is_finite.all(axis=-1, keepdims=True)
            online = _attended(score, tiles, q, kv, is_plain=False)
            np.copyto(acc, online.divided(), where=is_bad)
            np.copyto(row_sum, online.row_sum, where=sum_is_bad)
            np.copyto(log_sum, online.log_sum, where=sum_is_bad)
    acc, row_sum, log_sum = map(score.unstack, (acc, row_sum, log_sum))
    if score.sinks is not None:
        # The keys' share of the sum, by the distance to the sink: large logarithms are rounded.
        share = 1 / (1 + np.exp(score.sinks - log_sum))
        acc *= np.where(row_sum == 0, 1, share).astype(np.float32)
        log_sum = np.logaddexp(log_sum, score.sinks)
    out[...], lse[...] = acc, log_sum[..., 0]


def _attended(
    score: Score, tiles: list[slice], q: np.ndarray, kv: KV, is_plain: bool
) -> PlainSoftmax:
    """Return sums over all keys that the rows see; plain, if scores in natural units will do."""
    p, stacked = score.problem, score.stacked
    scale = np.float32(max(abs(p.scale), _TINY))
    rQ = score.stack(q)
    if p.scale < 0:
        rQ = -rQ  # the largest product shall be the largest score
    softmax: PlainSoftmax
    remains = np.float32(1)
    if is_plain:
        softmax = PlainSoftmax(stacked, p.head_dim_v)
        if not score.is_more_than_scaled and math.frexp(scale)[0] == 0.5:
            rQ, scale = rQ * scale, remains  # a power of two leaves q exact
    else:
        if not score.is_more_than_scaled:
            scale, remains = remains, scale
        kind = Fp8Softmax if p.precision == "fp8" else OnlineSoftmax
        softmax = kind(stacked, p.head_dim_v, remains)
    columns = max((keys.stop - keys.start for keys in tiles), default=0)
    buffer = np.empty(columns * math.prod(stacked), np.float32)
    product = np.empty((*stacked, p.head_dim_v), np.float32)
    for keys in tiles:
        tK, tV = kv.tiles(keys)
        shape = (*stacked, keys.stop - keys.start)
        rS = buffer[: math.prod(shape)].reshape(shape)
        np.matmul(rQ, tK.swapaxes(-1, -2), out=rS)
        scores = score.unstack(rS)
        score.apply(scores, scale, keys)
        hidden = score.hidden(keys)
        score.hide(scores, -np.inf, keys, hidden)
        softmax.weigh(rS)
        kept = score.kept(keys)
        if kept is not None:
            scores *= kept
        if keys is tiles[0]:
            score.product(rS, tV, keys, hidden, softmax.acc)
        else:
            softmax.acc += score.product(rS, tV, keys, hidden, product)
    return softmax


def _sees_any(score: Score, tiles: list[slice]) -> np.ndarray:
    """Return whether a row sees any key, (batch, heads_q, rows)."""
    found = np.zeros(score.by_head, bool)
    for keys in tiles:
        found |= ~score.unseen(keys, score.hidden(keys)).all(axis=-1)
    return found
