"""FlashAttention on NumPy arrays: tiles, online softmax, matrix products by BLAS.

The algorithm of the CUDA kernels, for the machine without a GPU. A query tile stays while the K/V
tiles pass by; each row keeps a running sum, an accumulator that is not divided by that sum until
the end and, where it needs one, a running maximum, so no more than one tile of scores exists at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.functions import NO_FUNCTIONS, Functions
from cufa.cpu.kv import KV
from cufa.cpu.query_tile import query_tile
from cufa.cpu.runs import Run, runs
from cufa.cpu.score import Score
from cufa.cpu.spans import spans
from cufa.features.feature import Tile
from cufa.features.parts import edges
from cufa.problem.problem import Problem
from cufa.quantized.e4m3 import E4M3

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
    group, most_rows = problem.group, ROWS
    if edges(problem.score):
        fewest, most = BOUNDED_ROWS
        seen = problem.seq_kv if problem.most_seen is None else problem.most_seen
        most_rows = min(max(seen // 8, fewest), most)
    rows = max(1, min(problem.seq_q, most_rows // group))
    keys = max(1, min(problem.seq_kv, KEYS))
    head_dims = problem.head_dim + problem.head_dim_v
    pairs = max(1, STEP_ELEMENTS // (keys * (rows * group + head_dims)))
    heads_kv = max(1, min(problem.heads_kv, pairs))
    batch = max(1, min(problem.batch, pairs // heads_kv))
    return Plan(batch, heads_kv, group, rows, keys)


def attention(
    problem: Problem, operands: Operands, functions: Functions = NO_FUNCTIONS
) -> np.ndarray:
    """Compute softmax(scale * Q K^T) V in tiles, accumulating in float32.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        Views as `parse` returns them: q (b, hq, sq, d), k (b, hk, sk, d), v (b, hk, sk, dv), and
        out (b, hq, sq, dv), where the result goes; or K and V of a cache. Any strides. For
        "Varlen", b is 1.
    functions : Functions
        The caller's functions.

    Returns
    -------
    ndarray
        (b, hq, sq) float32: natural logarithm of the sum of the exponentials of a row's scores,
        -inf for a row that sees no key (whose output is 0).

    Notes
    -----
    FlashAttention-2 (Dao 2023, algorithm 1), with the running maximum combined over the K/V tiles.
    Keys that a causal mask hides never reach a result, NaN included.
    """
    lse = np.empty(operands.out.shape[:3], np.float32)
    if operands.lengths.get("lengths_q") is not None:  # which leave rows out
        operands.out[...], lse[...] = 0, -np.inf
    if operands.k.dtype == np.uint8:  # the bytes of a cache, as on CuPy
        operands = operands._replace(k=operands.k.view(E4M3), v=operands.v.view(E4M3))
    # Infinities and NaN in the inputs, and a result too large for float16, are the caller's
    # business; log(0) = -inf is wanted for rows without a key.
    with np.errstate(all="ignore"):
        for step in steps(problem, operands, functions):
            kv = step.kv(operands)
            q, out, its_lse = map(step.of_queries, (operands.q, operands.out, lse))
            for score in step.scores:
                part = slice(None), slice(None), score.rows
                query_tile(score, step.columns, q[part], kv, out[part], its_lse[part])
    return lse


class Step(NamedTuple):
    """The work that runs at once: some sequences of a run, and some of their heads.

    Attributes
    ----------
    run : Run
    batch : slice
        The sequences, counted from the first of the run.
    numbers : slice
        The same, counted from the first of the call.
    heads, heads_kv : slice
        Query heads, and the K/V heads that they share.
    columns : int
        Keys of a tile.
    scores : list of Score
        The tiles of queries.
    """

    run: Run
    batch: slice
    numbers: slice
    heads: slice
    heads_kv: slice
    columns: int
    scores: list[Score]

    def of_queries(self, x: np.ndarray) -> np.ndarray:
        """View its part of an array in the order of q."""
        return self.run.queries(x)[self.batch, self.heads]

    def of_keys(self, x: np.ndarray) -> np.ndarray:
        """View its part of an array in the order of k and v."""
        return self.run.keys(x)[self.batch, self.heads_kv]

    def kv(self, operands: Operands) -> KV:
        """Return its keys and values."""
        arrays = operands.k, operands.v, *(scale[..., None] for scale in operands.scales)
        is_reused = len(self.scores) > 1 and self.run.table is None
        return KV(*map(self.of_keys, arrays), table=self.run.table, is_reused=is_reused)


def steps(problem: Problem, operands: Operands, functions: Functions) -> Iterator[Step]:
    """Yield the steps of a call."""
    for run in runs(problem, operands):
        first, batch = run.some.start, run.some.stop - run.some.start
        p = problem._replace(batch=batch, seq_q=run.seq_q, seq_kv=run.seq_kv, kv="Dense")
        if 0 in (p.heads_q, p.seq_q):
            continue
        sizes, diagonal = plan(p), p.seq_kv - p.seq_q
        for some, kv in product(spans(0, batch, sizes.batch), spans(0, p.heads_kv, sizes.heads_kv)):
            numbers = slice(first + some.start, first + some.stop)
            heads = slice(kv.start * sizes.group, kv.stop * sizes.group)
            arrays = {
                name: array[heads] if array.ndim == 1 else array[numbers, heads]
                for name, array in operands.score_arrays.items()
            }
            tiles = (
                Tile(numbers, heads, rows, slice(0, 0), diagonal, arrays, operands.seed)
                for rows in spans(0, p.seq_q, sizes.rows)
            )
            scores = [Score(p, tile, functions) for tile in tiles]
            yield Step(run, some, numbers, heads, kv, sizes.keys, scores)
