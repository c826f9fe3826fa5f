"""The prefill tables: cufa and its peers, cell by cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import cupy

from benchmarks import graphs
from benchmarks.cells import Cell
from benchmarks.contestants import Contestants, rows_of
from benchmarks.inputs import Operands
from benchmarks.race import Budget
from cufa.explorer.clock import Clock


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

    def row_of(cell: Cell) -> dict[str, Any] | None:
        ready = contestants.ready(Operands(cell, rng, scores))
        if ready is None:
            return None
        ms, replayed = graphs.medians(ready.calls, clock, budget, timing)
        return ready.row({name: cell.tflops(each) for name, each in ms.items()}, replayed)

    return rows_of(cells, row_of)
