"""FlashAttention on NumPy arrays: tiles, online softmax, matrix products by BLAS.

The algorithm of the CUDA kernels, for the machine without a GPU. A query tile stays while the K/V
tiles pass by; each row keeps its running maximum m, its running sum and an accumulator that is not
divided by that sum until the end, so no more than one tile of scores exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.kv import KV, Dense
from cufa.cpu.own import NO_FUNCTIONS, Own
from cufa.cpu.score import Score
from cufa.features.dropout import Dropout
from cufa.problem.problem import Problem

#: Rows of a query tile, counted over the query heads that share a K/V head, and keys of a K/V
#: tile: large enough for BLAS to run at nearly its full speed.
ROWS = 512
KEYS = 256

#: Elements of float32 that a step works on, the scores and the tiles of K and V: 1 MiB, a usual
#: level-2 cache. Where one (batch, head) pair needs less, several share a step, which spreads the
#: cost of the Python loop.
STEP_ELEMENTS = 1 << 18

#: In place of a scale of 0, as on the GPU: 0 times the -inf of a hidden key would be NaN.
_TINY = float(np.finfo(np.float32).tiny)


class Plan(NamedTuple):
    """How a call runs on the CPU: the sizes of one step.

    Attributes
    ----------
    batch, heads_kv : int
        Batch indices and K/V heads that a step takes together.
    group : int
        Query heads of a K/V head.
    rows, keys : int
        Query positions and keys of a tile of scores.
    """

    batch: int
    heads_kv: int
    group: int
    rows: int
    keys: int

    def __str__(self) -> str:
        """One line."""
        return (
            f"numpy batch={self.batch} heads_kv={self.heads_kv} group={self.group} "
            f"rows={self.rows} keys={self.keys} (NumPy arrays run on the CPU)"
        )


def plan(problem: Problem) -> Plan:
    """Choose the tiles, and how many (batch, K/V head) pairs share a step.

    Parameters
    ----------
    problem : Problem

    Returns
    -------
    Plan
        `str` of it is one line.
    """
    rows = max(1, min(problem.seq_q, ROWS // problem.group))
    keys = max(1, min(problem.seq_kv, KEYS))
    head_dims = problem.head_dim + problem.head_dim_v
    pairs = max(1, STEP_ELEMENTS // (keys * (rows * problem.group + head_dims)))
    heads_kv = max(1, min(problem.heads_kv, pairs))
    batch = max(1, min(problem.batch, pairs // heads_kv))
    return Plan(batch, heads_kv, problem.group, rows, keys)


def attention(
    problem: Problem, operands: Operands, own: Own = NO_FUNCTIONS
) -> tuple[np.ndarray, np.ndarray]:
    """Compute softmax(scale * Q K^T) V in tiles, accumulating in float32.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        Views as `parse` returns them: q (b, hq, sq, d), k (b, hk, sk, d),
        v (b, hk, sk, dv), and out (b, hq, sq, dv) or None. Any strides.
    own : Own
        The caller's functions.

    Returns
    -------
    out : ndarray
        (b, hq, sq, dv) in q's dtype: `operands.out`, or a new array if that is None.
    lse : ndarray
        (b, hq, sq) float32: natural logarithm of the sum of the exponentials of a row's scores,
        -inf for a row that sees no key (whose output is 0).

    Notes
    -----
    FlashAttention-2 (Dao 2023, algorithm 1), with the running maximum combined over the K/V tiles.
    What a causal mask hides is never read into a result, NaN included.
    """
    q, k, v, out, beside, seed = operands
    if problem.of(Dropout) and "numbers" not in beside:
        beside = {**beside, "numbers": numbers(problem.batch, problem.heads_q)}
    if out is None:
        shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)
        out = np.empty(shape, q.dtype)
    lse = np.empty(out.shape[:3], np.float32)
    if lse.size == 0:
        return out, lse
    step = plan(problem)
    # Infinities and NaN in the inputs, and a result too large for float16, are the caller's
    # business; log(0) = -inf is wanted for rows without a key.
    with np.errstate(all="ignore"):
        for batch in spans(0, problem.batch, step.batch):
            for kv in spans(0, problem.heads_kv, step.heads_kv):
                heads = slice(kv.start * step.group, kv.stop * step.group)
                for rows in spans(0, problem.seq_q, step.rows):
                    query_tile(
                        problem,
                        rows,
                        q[batch, heads, rows],
                        Dense(k[batch, kv], v[batch, kv]),
                        out[batch, heads, rows],
                        lse[batch, heads, rows],
                        beside and of_heads(beside, batch, heads),
                        own.of(batch, heads),
                        seed,
                    )
    return out, lse


def numbers(batch: int, heads: int) -> np.ndarray:
    """Return number of the sequence and of the head, (batch, heads, 2), by which weights drop."""
    found: np.ndarray = np.moveaxis(np.indices((batch, heads)), 0, -1)
    return found


def of_heads(beside: Mapping[str, np.ndarray], batch: slice, heads: slice) -> dict[str, np.ndarray]:
    """Return the parts of arrays beside q, k and v that are some sequences' and query heads'."""
    return {
        name: array[heads] if array.ndim == 1 else array[batch, heads]
        for name, array in beside.items()
    }


def spans(first: int, end: int, step: int) -> Iterator[slice]:
    """Yield the parts of what lies between two numbers, of `step` each but for the last."""
    for start in range(first, end, step):
        yield slice(start, min(start + step, end))


def query_tile(
    problem: Problem,
    rows: slice,
    q: np.ndarray,
    kv: KV,
    out: np.ndarray,
    lse: np.ndarray,
    beside: Mapping[str, np.ndarray] = MappingProxyType({}),
    own: Own = NO_FUNCTIONS,
    seed: int = 0,
) -> None:
    """Attend from one tile of queries, positions `rows` of several heads, to all keys they see.

    Parameters
    ----------
    problem : Problem
        For its group, lengths, head dims, mask and scale.
    rows : slice
    q : ndarray, (batch, heads_q, rows, head_dim)
        Of some sequences and heads.
    kv : KV
        Theirs.
    out, lse : ndarray, (batch, heads_q, rows, head_dim_v) and (batch, heads_q, rows)
        Where the result goes.
    beside : mapping
        Arrays of these sequences and heads that parts of the score read, by argument.
    own : Own
        The caller's functions, of these sequences and heads.
    seed : int
        Of a dropout.
    """
    # The heads of a group lie below each other, so that they share one product with K.
    batch, heads_q = q.shape[:2]
    stacked = (batch, heads_q // problem.group, problem.group * (rows.stop - rows.start))
    rQ = np.array(q, dtype=np.float32, order="C").reshape(*stacked, problem.head_dim)
    if problem.scale < 0:
        rQ *= np.float32(-1)  # the largest product shall be the largest score
    scale = np.float32(max(abs(problem.scale), _TINY))
    acc = np.zeros((*stacked, problem.head_dim_v), np.float32)
    m = np.full((*stacked, 1), -np.inf, np.float32)
    row_sum = np.zeros((*stacked, 1), np.float32)
    ones = np.ones((KEYS, 1), np.float32)

    first, end = problem.sees(rows)
    score = Score(problem, rows, stacked, beside, own, seed)
    factor, scale = scale, np.float32(1) if score.is_more_than_scaled else scale
    for keys in spans(int(first.min()), int(end.max()), KEYS):
        if own.is_hidden(rows, keys):
            continue
        tK, tV = kv.tiles(keys)
        rS = rQ @ tK.swapaxes(-1, -2)
        if score.is_more_than_scaled:
            score.apply(rS, factor, keys)
        hidden = score.hidden(keys)
        if keys.start < first.max() or keys.stop > end.min():
            j = np.arange(keys.start, keys.stop)
            outside = (j < first[:, None]) | (j >= end[:, None])
            outside = np.tile(outside, (problem.group, 1))[None, None]
            hidden = outside if hidden is None else outside | hidden
        if hidden is not None:
            np.copyto(rS, -np.inf, where=hidden)
        m_new = np.maximum(m, rS.max(axis=-1, keepdims=True))
        # A row that has seen no key keeps m = -inf; -inf - 0 avoids the NaN of -inf - (-inf).
        m_safe = np.where(m_new == -np.inf, np.float32(0), m_new)
        rS -= m_safe
        rS *= scale  # not before: a scaled Q, or scores, may not fit float32
        rP = np.exp(rS, out=rS)
        rescale = np.exp((m - m_safe) * scale)
        m = m_new
        row_sum *= rescale
        row_sum += rP @ ones[: rP.shape[-1]]  # three times as fast as rP.sum
        score.drop(rP, keys)
        acc *= rescale
        acc += rP @ tV if hidden is None else _masked_product(rP, tV, hidden)

    acc /= np.where(row_sum == 0, np.float32(1), row_sum)
    dropout = problem.of(Dropout)
    if dropout is not None:
        acc /= np.float32(dropout.keep)
    log_sum = m * scale + np.log(row_sum)
    sinks = score.sinks()
    if sinks is not None:
        # What keys and sink have of the sum, from their distance: large logarithms are rounded.
        acc *= np.where(row_sum == 0, np.float32(1), 1 / (1 + np.exp(sinks - log_sum)))
        log_sum = np.logaddexp(log_sum, sinks)
    out[...] = acc.reshape(out.shape)
    lse[...] = log_sum.reshape(lse.shape)


def _masked_product(rP: np.ndarray, tV: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Compute P V where P is 0 at hidden places, also if V is infinite or NaN there."""
    bad = ~np.isfinite(tV).all(axis=-1)
    if not bad.any():
        return rP @ tV
    product = rP @ np.where(bad[..., None], np.float32(0), tV)
    for j in np.flatnonzero(bad.any(axis=(0, 1))):
        value = np.where(bad[:, :, j, None], tV[:, :, j], np.float32(0))[:, :, None]
        weighted = rP[..., j, None] * value
        product += np.where(hidden[..., j, None], np.float32(0), weighted)
    return product
