"""The prefill tables: cufa and its peers, cell by cell."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import cupy

from benchmarks.cells import Cell
from benchmarks.contestants import Contestants, free_memory
from benchmarks.inputs import Operands
from benchmarks.results import figures
from cufa.explorer.clock import Clock
from cufa.explorer.race import Budget, medians


def rows(
    contestants: Contestants,
    cells: Iterable[Cell],
    clock: Clock,
    budget: Budget,
    seed: int,
    scores: str,
) -> Iterator[dict[str, Any]]:
    """Yield a result row a cell that cufa can run, and print a line for each.

    Parameters
    ----------
    contestants : Contestants
    cells : iterable of Cell
    clock : Clock
    budget : Budget
        Time a cell.
    seed : int
        Of the random data.
    scores : str
        One of `benchmarks.cells.SCORES`.
    """
    rng = cupy.random.default_rng(seed)
    for cell in cells:
        started = time.perf_counter()
        row = _row(contestants, Operands(cell, rng, scores), clock, budget)
        free_memory()
        if row is None:
            continue
        print(f"{cell}: {figures(row)} [{time.perf_counter() - started:.1f} s]", flush=True)
        yield row


def _row(
    contestants: Contestants, operands: Operands, clock: Clock, budget: Budget
) -> dict[str, Any] | None:
    ready = contestants.ready(operands)
    if ready is None:
        return None
    times = medians(ready.calls, clock, budget)
    return ready.row({name: operands.cell.tflops(ms) for name, ms in times.items()})
