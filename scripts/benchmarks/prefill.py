"""The prefill tables: cufa and its peers, cell by cell."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import cupy

from benchmarks import graphs
from benchmarks.cells import Cell
from benchmarks.contestants import Contestants, free_memory
from benchmarks.inputs import Operands
from benchmarks.results import figures
from cufa.explorer.clock import Clock
from cufa.explorer.race import Budget


def rows(
    contestants: Contestants,
    cells: Iterable[Cell],
    clock: Clock,
    budget: Budget,
    seed: int,
    scores: str,
    timing: str,
) -> Iterator[dict[str, Any]]:
    """Yield a result row a cell that cufa can run, and print a line for each.

    `budget` is that of a cell, `scores` one of `benchmarks.cells.SCORES` and `timing` a key of
    `benchmarks.graphs.REPLAYED_BELOW_MS`.
    """
    rng = cupy.random.default_rng(seed)
    for cell in cells:
        started = time.perf_counter()
        row = _row(contestants, Operands(cell, rng, scores), clock, budget, timing)
        free_memory()
        if row is None:
            continue
        print(f"{cell}: {figures(row)} [{time.perf_counter() - started:.1f} s]", flush=True)
        yield row


def _row(
    contestants: Contestants, operands: Operands, clock: Clock, budget: Budget, timing: str
) -> dict[str, Any] | None:
    ready = contestants.ready(operands)
    if ready is None:
        return None
    race, replayed = graphs.begin(ready.calls, clock, timing)
    race.run(budget)
    row = ready.row({name: ready.cell.tflops(race.median(name)) for name in ready.calls})
    return {**row, "replayed": replayed} if replayed else row
