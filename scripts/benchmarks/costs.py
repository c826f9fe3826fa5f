"""Times of all variants that may be useful, in problems of many sizes, to find costs from."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from benchmarks import drawn, graphs, model_shapes
from benchmarks.cells import SEQS, Cell
from benchmarks.contestants import reason, rounded, rows_of, say
from benchmarks.cost_fit import DTYPE, KERNEL, LEFT_OUT, MOST_SPILLED, name_of
from benchmarks.race import Budget, Race
from cufa import device as devices
from cufa.compiler.nvrtc import Compiled
from cufa.explorer.build import compile_all
from cufa.explorer.clock import Call, CudaClock
from cufa.explorer.space import variants
from cufa.explorer.subject import Stage, Subject
from cufa.specs import ATTENTION_KERNELS
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

PROBLEMS = {
    (32, 32): 22,
    (64, 64): 45,
    (96, 96): 35,
    (128, 128): 40,
    (192, 128): 20,
    (192, 192): 28,
    (256, 256): 26,
}
"""How many are drawn of each pair of head dims, with and without a mask."""

BURST_MS = 0.3
BUDGET = Budget(rounds=5)
_DRAWN = 4000


def cells(seed: int) -> list[Cell]:
    """Return the problems, the same for a seed on any machine, in any order.

    They are those that `drawn.cells` draws, as many of each pair as `PROBLEMS` says; of the
    standard table; and of the models that have prompts.
    """
    device = devices.named("h200")
    found: dict[Cell, None] = {}
    left = {(dims, causal): n for dims, n in PROBLEMS.items() for causal in (False, True)}
    # None of the problems that regret is measured with has unequal head dims.
    for cell in (*drawn.cells(seed, _DRAWN), *drawn.cells(seed, _DRAWN, ((192, 128),))):
        key = ATTENTION_KERNELS[KERNEL].padded(device, cell.d, cell.dv), cell.causal
        if left[key]:
            left[key] -= 1
            found[cell] = None
    for d, dv in PROBLEMS:
        for causal in (False, True):
            for seq in SEQS if d in (64, 128, 256) else SEQS[::2]:
                heads = 2048 // max(d, dv)
                found[Cell(DTYPE, 16384 // seq, heads, heads, seq, seq, d, dv, causal)] = None
    prompts = (shape.cell for shape in model_shapes.chosen(None) if shape.cell.sq > 64)
    found.update(dict.fromkeys(prompts))
    mixed = list(found)
    random.Random(seed).shuffle(mixed)
    return mixed


def rows(seed: int, seconds: float | None) -> Iterator[dict[str, Any]]:
    """Yield a row a problem, with the microseconds of each variant, and print a line for each.

    Parameters
    ----------
    seed : int
        Which problems.
    seconds : float or None
        After which no problem is begun.

    Raises
    ------
    RuntimeError
        The GPU does not run the kernel.
    """
    device = devices.current()
    if not ATTENTION_KERNELS[KERNEL].runs_on(device):
        raise RuntimeError(f"{device.name} does not run {KERNEL}")
    todo = cells(seed)
    cubins = _compiled(todo)
    clock, started = CudaClock(rest_s=0), time.perf_counter()

    def row_of(cell: Cell) -> dict[str, Any] | None:
        if seconds is not None and time.perf_counter() - started > seconds:
            return None
        stage = Stage(Subject(cell.problem, device))
        calls: dict[Variant, Call] = {}
        for variant in variants(cell.problem, device, [KERNEL]):
            if variant not in cubins:
                continue
            try:
                calls[variant] = stage.ready(variant, cubins[variant])
                stage.run(calls[variant])
            except (*stage.errors, ValueError) as error:
                calls.pop(variant, None)
                say(f"{cell}: {variant} cannot: {reason(error)}")
        race = Race(calls, clock, BURST_MS)
        race.estimate()
        least = min(race.first_ms.values())
        race.running = [v for v in calls if race.first_ms[v] <= LEFT_OUT * least]
        complaints = race.replay(graphs.capture)
        race.running = [v for v in race.running if v not in complaints]
        race.run(BUDGET)
        us = {_name(v): rounded(1e3 * race.median(v), 4) for v in race.running}
        return {**cell.row(), "seed": seed, "us": us}

    return rows_of(todo, row_of)


def _name(variant: Variant) -> str:
    return name_of(TileShape(*(getattr(variant, field) for field in TileShape._fields)))


def _compiled(todo: list[Cell]) -> dict[Variant, bytes]:
    """Return the cubins of all variants that keep to the registers, but for a few."""
    device = devices.current()
    one_each = {
        (ATTENTION_KERNELS[KERNEL].padded(device, cell.d, cell.dv), cell.causal): cell
        for cell in todo
    }
    wanted = [v for cell in one_each.values() for v in variants(cell.problem, device, [KERNEL])]
    print(f"{len(todo)} problems, {len(wanted)} variants on {os.cpu_count()} cores", flush=True)
    with closing(compile_all(wanted, device.arch)) as results:
        return {
            built.variant: built.compiled.cubin
            for built in results
            if isinstance(built.compiled, Compiled) and built.compiled.spill_bytes <= MOST_SPILLED
        }
