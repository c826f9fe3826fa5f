"""Head dims against each other: all of one mask in the same race."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cupy

from benchmarks.cells import Cell, headdim_cells
from benchmarks.contestants import CUFA, Contestants, free_memory
from benchmarks.inputs import Operands
from benchmarks.race import Budget, medians
from benchmarks.results import figures
from cufa.explorer.clock import Clock

HeadDims = tuple[int, int]


def rows(
    contestants: Contestants, clock: Clock, budget: Budget, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a row a cell, and print a line for each; the budget is that of all of one mask."""
    rng = cupy.random.default_rng(seed)
    for causal in (False, True):
        found = _race(contestants, headdim_cells(causal), rng, clock, budget)
        free_memory()
        for cell, row in found.items():
            print(f"{cell}: {figures(row)}", flush=True)
            yield row


def _race(
    contestants: Contestants, cells: Sequence[Cell], rng: Any, clock: Clock, budget: Budget
) -> dict[Cell, dict[str, Any]]:
    """Return the rows of the cells that cufa can run."""
    field = [ready for cell in cells if (ready := contestants.ready(Operands(cell, rng)))]
    calls = {(ready.cell, name): call for ready in field for name, call in ready.calls.items()}
    times = medians(calls, clock, budget)
    tflops = {(cell, name): cell.tflops(ms) for (cell, name), ms in times.items()}
    ours = {(cell.d, cell.dv): figure for (cell, name), figure in tflops.items() if name == CUFA}
    return {
        ready.cell: ready.row(
            {
                **{name: tflops[ready.cell, name] for name in ready.calls},
                **references(
                    (ready.cell.d, ready.cell.dv),
                    (ready.variant.head_dim, ready.variant.head_dim_v),
                    ours,
                ),
            }
        )
        for ready in field
    }


def references(
    dims: HeadDims, padded: HeadDims, ours: Mapping[HeadDims, float]
) -> dict[str, float]:
    """Return cufa's figures in the same race that those of one cell are compared with.

    They are ``cufa_d128`` and, where the cell's own head dims are padded, ``cufa_padded``, as far
    as `ours`, cufa's TFLOP/s by head dims, has them.
    """
    found = {"cufa_d128": ours.get((128, 128))}
    if padded != dims:
        found["cufa_padded"] = ours.get(padded)
    return {name: figure for name, figure in found.items() if figure is not None}
