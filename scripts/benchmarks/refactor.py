"""The standard tables by the package as it was and as it is, call against call."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import cupy

from benchmarks import before, graphs
from benchmarks.cells import TABLES, Cell
from benchmarks.contestants import CUFA, Contestants, rows_of, say
from benchmarks.inputs import Operands
from benchmarks.peers import cufa_call
from benchmarks.summary import summarise
from cufa.explorer.clock import CudaClock
from cufa.explorer.race import Budget

BEFORE = "before"
ROUNDS = 40


class Refactor:
    """Races of two packages, in one cell after the other.

    Parameters
    ----------
    older : str
        The package as it was, see `benchmarks.before.resolve`.
    rounds : int
        Of a cell, at most.
    seed : int
        Of the random data.

    Attributes
    ----------
    failed : int
        Cells that one of the two could not run.
    """

    def __init__(self, older: str, rounds: int, seed: int) -> None:
        self._older = older
        self._clock = CudaClock(rest_s=0)
        self._rounds = rounds
        self._rng = cupy.random.default_rng(seed)
        self.failed = 0

    def rows(
        self, names: Iterable[str], head_dims: Sequence[int] | None, seqs: Sequence[int]
    ) -> Iterator[dict[str, Any]]:
        """Yield a row a cell, and print a line for each and one for each table.

        Parameters
        ----------
        names : iterable of str
            Keys of `TABLES`.
        head_dims : sequence of int, optional
            Those of the tables by default.
        seqs : sequence of int
        """
        with before.beside(self._older) as package:
            for name in names:
                found = []
                row_of = functools.partial(self._row, package, TABLES[name].kernel)
                for row in rows_of(TABLES[name].cells(head_dims, seqs), row_of):
                    found.append(row)
                    yield row
                if found:
                    print(f"{name}: {_in_a_line(found)}", flush=True)

    def _row(self, package: ModuleType, kernel: str | None, cell: Cell) -> dict[str, Any] | None:
        makers = {BEFORE: functools.partial(cufa_call, kernel=kernel, package=package)}
        ready = Contestants(kernel, makers, makers).ready(Operands(cell, self._rng))
        if ready is None or BEFORE not in ready.calls:
            say(f"{cell}: left out, for want of two to compare")
            self.failed += 1
            return None
        race, replayed = graphs.begin(ready.calls, self._clock, "auto")
        if len(replayed) == 1:  # both or none
            race, replayed = graphs.begin(ready.calls, self._clock, "events")
        race.run(Budget(rounds=self._rounds, contestant_ms=1000.0, least=10))
        tflops = cell.tflops(race.median(BEFORE))
        # Not each one's own median: within a round the card's clock is the same for both.
        speeds = {CUFA: tflops * race.ratio(BEFORE, CUFA), BEFORE: tflops}
        return ready.row(speeds, replayed)


def _in_a_line(rows: Sequence[dict[str, Any]]) -> str:
    cells, geomean, minimum, worst = summarise(rows)[BEFORE]
    mask = "causal" if worst["causal"] else "full"
    return (
        f"{cells} cells, {geomean:.4f} times as fast as before in geometric mean, "
        f"{minimum:.4f} at least (D {worst['d']}, {mask}, S {worst['sq']})"
    )
