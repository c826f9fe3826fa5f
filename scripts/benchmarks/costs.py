"""Times of all that the planner chooses from, in problems of many sizes, to find costs from."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from benchmarks import graphs
from benchmarks.cells import SEQS, Cell
from benchmarks.contestants import reason, rounded, rows_of, say
from benchmarks.cost_fit import KERNEL
from benchmarks.drawn import size
from cufa import device as devices
from cufa.compiler.nvrtc import Compiled
from cufa.explorer.build import compile_all
from cufa.explorer.clock import Call, CudaClock
from cufa.explorer.race import Budget, Race
from cufa.explorer.stage import Stage
from cufa.kernel import ATTENTION_KERNELS
from cufa.planner.rules import choice
from cufa.planner.tiles import all_head_dims
from cufa.variant import Variant

DTYPE = "bfloat16"

PROBLEMS = 36
"""Of each pair of head dims, with and without a mask, beside those of the standard table."""

BURST_MS = 0.3
BUDGET = Budget(rounds=5)
MOST_OPERATIONS = 2**38
"""Of both products, counted without a mask."""


def cells(seed: int) -> list[Cell]:
    """Return the problems, the same for a seed on any machine; those of equal variants together."""
    rng = random.Random(seed)
    found: dict[Cell, None] = {}
    for d, dv in all_head_dims(KERNEL, devices.current()):
        for causal in (False, True):
            for seq in SEQS:
                heads = 2048 // max(d, dv)
                found[Cell(DTYPE, 16384 // seq, heads, heads, seq, seq, d, dv, causal)] = None
            drawn = (_drawn(rng, d, dv, causal) for _ in range(10**6))
            some = (cell for cell in drawn if cell._replace(causal=False).flops <= MOST_OPERATIONS)
            for _, cell in zip(range(PROBLEMS), some, strict=False):
                found[cell] = None
    return list(found)


def _drawn(rng: random.Random, d: int, dv: int, causal: bool) -> Cell:
    """Return a problem; each doubling of a size is as likely. Most have as many keys as rows."""
    heads, group = size(rng, 1, 768), rng.choice((1, 1, 4))
    b = heads // 32 if heads > 32 else 1
    hq = -(-heads // b // group) * group
    sq, sk = size(rng, 16, 16384), size(rng, 16, 16384)
    if rng.random() < 0.7:
        sk = sq
    elif causal:
        sq, sk = min(sq, sk), max(sq, sk)
    return Cell(DTYPE, b, hq, hq // group, sq, sk, d, dv, causal)


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row a problem, with the microseconds of each variant, and print a line for each.

    RuntimeError where the GPU does not run the kernel.
    """
    if not ATTENTION_KERNELS[KERNEL].runs_on(devices.current()):
        raise RuntimeError(f"{devices.current().name} does not run {KERNEL}")
    todo = cells(seed)
    cubins = _compiled(todo)
    clock, device = CudaClock(rest_s=0), devices.current()

    def row_of(cell: Cell) -> dict[str, Any] | None:
        stage = Stage(cell.problem, None, device)
        calls: dict[Variant, Call] = {}
        for variant in _variants(cell):
            try:
                calls[variant] = stage.ready(variant, cubins[variant])
                stage.run(calls[variant])
            except (*stage.errors, ValueError, KeyError) as error:
                say(f"{cell}: {variant} cannot: {reason(error)}")
                return None
        race = Race(calls, clock, BURST_MS)
        race.estimate()
        race.replay(graphs.capture)
        race.run(BUDGET)
        return {**cell.row(), "us": {_name(v): rounded(1e3 * race.median(v), 4) for v in calls}}

    return rows_of(todo, row_of)


def _variants(cell: Cell) -> list[Variant]:
    problem = cell.problem
    dims = problem.head_dim, problem.head_dim_v
    return choice(KERNEL, DTYPE, dims, problem.score, devices.current()).variants


def _name(variant: Variant) -> str:
    """Return the template arguments that tiles differ in, for `TileShape`."""
    v = variant
    return f"{v.bm} {v.bn} {v.stages} {v.warps} {v.blocks_per_sm} {int(v.ping_pong)}"


def _compiled(todo: list[Cell]) -> dict[Variant, bytes]:
    variants = dict.fromkeys(v for cell in todo for v in _variants(cell))
    print(f"{len(todo)} problems, {len(variants)} variants on {os.cpu_count()} cores", flush=True)
    with closing(compile_all(variants, devices.current().arch)) as results:
        return {
            built.variant: built.compiled.cubin
            for built in results
            if isinstance(built.compiled, Compiled)
        }
