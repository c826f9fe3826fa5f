"""FlashAttention on NumPy arrays: tiles, online softmax, matrix products by BLAS.

The algorithm of the CUDA kernels, for the machine without a GPU. A query tile stays while the K/V
tiles pass by; each row keeps a running sum, an accumulator that is not divided by that sum until
the end and, where it needs one, a running maximum, so no more than one tile of scores exists at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.functions import NO_FUNCTIONS, Functions
from cufa.cpu.kv import KV, Dense
from cufa.cpu.query_tile import query_tile
from cufa.cpu.score import Score
from cufa.cpu.spans import spans
from cufa.features.dropout import Dropout
from cufa.features.parts import edges
from cufa.problem.problem import Problem

#: Rows of a query tile, counted over the query heads that share a K/V head, and keys of a K/V
#: tile: large enough for BLAS to run at nearly its full speed.
ROWS = 512
KEYS = 256

#: Bounds of the rows where a mask bounds the keys, which are an eighth of the keys that a row may
#: see: fewer rows, so that fewer scores are computed that the mask hides.
BOUNDED_ROWS = 128, 256

#: Elements of float32 that a step works on, the scores and the tiles of K and V: 1 MiB, a usual
#: level-2 cache. Where one (batch, head) pair needs less, several share a step, which spreads the
#: cost of the Python loop.
STEP_ELEMENTS = 1 << 18


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
    most_rows = ROWS
    if edges(problem.score):
        fewest, most = BOUNDED_ROWS
        seen = problem.seq_kv if problem.most_seen is None else problem.most_seen
        most_rows = min(max(seen // 8, fewest), most)
    rows = max(1, min(problem.seq_q, most_rows // problem.group))
    keys = max(1, min(problem.seq_kv, KEYS))
    head_dims = problem.head_dim + problem.head_dim_v
    pairs = max(1, STEP_ELEMENTS // (keys * (rows * problem.group + head_dims)))
    heads_kv = max(1, min(problem.heads_kv, pairs))
    batch = max(1, min(problem.batch, pairs // heads_kv))
    return Plan(batch, heads_kv, problem.group, rows, keys)


def attention(
    problem: Problem, operands: Operands, functions: Functions = NO_FUNCTIONS
) -> tuple[np.ndarray, np.ndarray]:
    """Compute softmax(scale * Q K^T) V in tiles, accumulating in float32.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        Views as `parse` returns them: q (b, hq, sq, d), k (b, hk, sk, d),
        v (b, hk, sk, dv), and out (b, hq, sq, dv) or None. Any strides.
    functions : Functions
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
    Keys that a causal mask hides never reach a result, NaN included.
    """
    q, k, v, out, score_arrays, *_ = operands
    if problem.of(Dropout) and "numbers" not in score_arrays:
        score_arrays = {**score_arrays, "numbers": numbers(problem.batch, problem.heads_q)}
    if out is None:
        out = np.empty((*q.shape[:3], problem.head_dim_v), q.dtype)
    lse = np.empty(out.shape[:3], np.float32)
    if lse.size == 0:
        return out, lse
    operands, step = operands._replace(out=out, score_arrays=score_arrays), plan(problem)
    # Infinities and NaN in the inputs, and a result too large for float16, are the caller's
    # business; log(0) = -inf is wanted for rows without a key.
    with np.errstate(all="ignore"):
        for batch in spans(0, problem.batch, step.batch):
            kv_of = partial(_dense, k[batch], v[batch], is_reused=step.rows < problem.seq_q)
            attend(problem, step, batch, operands, lse, kv_of, functions)
    return out, lse


def _dense(k: np.ndarray, v: np.ndarray, heads_kv: slice, *, is_reused: bool) -> Dense:
    return Dense(k[:, heads_kv], v[:, heads_kv], is_reused)


def attend(
    problem: Problem,
    step: Plan,
    batch: slice,
    operands: Operands,
    lse: np.ndarray,
    kv_of: Callable[[slice], KV],
    functions: Functions = NO_FUNCTIONS,
) -> None:
    """Compute attention of some sequences, step by step; `kv_of` finds K and V of some heads."""
    q, _, _, out, score_arrays, seed, *_ = operands
    for kv in spans(0, problem.heads_kv, step.heads_kv):
        heads = slice(kv.start * step.group, kv.stop * step.group)
        tiles, of_step = kv_of(kv), functions.of(batch, heads)
        arrays = score_arrays and of_heads(score_arrays, batch, heads)
        for rows in spans(0, problem.seq_q, step.rows):
            part = batch, heads, rows
            sizes = q[part].shape
            stacked = sizes[0], kv.stop - kv.start, step.group * sizes[2]
            score = Score(problem, rows, stacked, arrays, of_step, seed)
            query_tile(score, step.keys, q[part], tiles, out[part], lse[part])


def numbers(batch: int, heads: int) -> np.ndarray:
    """Return number of the sequence and of the head, (batch, heads, 2), by which weights drop."""
    found: np.ndarray = np.moveaxis(np.indices((batch, heads)), 0, -1)
    return found


def of_heads(
    score_arrays: Mapping[str, np.ndarray], batch: slice, heads: slice
) -> dict[str, np.ndarray]:
    """Return some sequences' and query heads' parts of the arrays next to q, k and v."""
    return {
        name: array[heads] if array.ndim == 1 else array[batch, heads]
        for name, array in score_arrays.items()
    }
