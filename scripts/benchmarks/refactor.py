"""The standard tables, models, masks and decoding before a change and after, call against call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import cupy

import cufa
from benchmarks import before, decode, graphs, masks, model_shapes, models
from benchmarks.calls import in_turn
from benchmarks.cells import TABLES, Cell
from benchmarks.contestants import CUFA, columns, reason, rounded, rows_of, say
from benchmarks.inputs import Operands
from benchmarks.peers import cufa_call
from benchmarks.race import Budget
from benchmarks.summary import summarise
from cufa import device as devices
from cufa.explorer.clock import Call, CudaClock

BEFORE = "before"
ROUNDS = 40


class Case(NamedTuple):
    """A call that both packages make.

    Attributes
    ----------
    label : str
        In the row, apart from the cell: a feature, a model, or how a cache lies.
    cell : Cell
    call : callable
        Random numbers and packages -> the call of each on the same arrays.
    """

    label: str
    cell: Cell
    call: Callable[[Any, Sequence[ModuleType]], list[Call]]

    def __str__(self) -> str:
        """One short line."""
        return f"{self.cell} {self.label}".rstrip()


def cases(
    family: str, head_dims: Sequence[int] | None, seqs: Sequence[int], l2_bytes: int
) -> list[Case]:
    """Return what is raced of a family.

    Parameters
    ----------
    family : str
        One of `benchmarks.cells.FAMILIES`.
    head_dims : sequence of int, optional
        Head dims of a standard table; its own by default.
    seqs : sequence of int
        Sequence lengths of a standard table.
    l2_bytes : int
        A cache of keys and values is read from memory beyond it.
    """
    if family == "models":
        return [
            Case(shape.model, shape.cell, _attention(shape.cell, None, l2_bytes))
            for shape in model_shapes.SHAPES
        ]
    if family == "masks":
        return [Case(case.feature, case.cell, _masked(case)) for case in masks.cases()]
    if family == "decode":
        return [
            Case(way.name, cell, _decoding(cell, way, l2_bytes))
            for cell in decode.cells()
            for way in decode.WAYS
            if way.unified_max is None
        ]
    table = TABLES[family]
    return [Case("", c, _attention(c, table.kernel)) for c in table.cells(head_dims, seqs)]


def _attention(
    cell: Cell, kernel: str | None, l2_bytes: int | None = None
) -> Callable[[Any, Sequence[ModuleType]], list[Call]]:
    def calls(rng: Any, packages: Sequence[ModuleType]) -> list[Call]:
        sets = 1 if l2_bytes is None else models.sets_of(cell, l2_bytes)
        operands = [Operands(cell, rng) for _ in range(sets)]
        return [in_turn([cufa_call(o, kernel, package) for o in operands]) for package in packages]

    return calls


def _masked(case: masks.Case) -> Callable[[Any, Sequence[ModuleType]], list[Call]]:
    def calls(rng: Any, packages: Sequence[ModuleType]) -> list[Call]:
        operands = Operands(case.cell, rng)
        seed = int(rng.integers(2**31))
        draws = [cupy.random.default_rng(seed) for _ in packages]  # the same arrays for both
        return [case.call(operands, *each)[0] for each in zip(draws, packages, strict=True)]

    return calls


def _decoding(
    cell: Cell, way: decode.Way, l2_bytes: int
) -> Callable[[Any, Sequence[ModuleType]], list[Call]]:
    def calls(rng: Any, packages: Sequence[ModuleType]) -> list[Call]:
        sets = [Operands(cell, rng) for _ in range(models.sets_beyond_l2(cell, l2_bytes))]
        return [in_turn([decode.call_of(o, way, package) for o in sets]) for package in packages]

    return calls


class Refactor:
    """Races of two packages, in one cell after the other.

    Parameters
    ----------
    older : str
        The package as it was, see `benchmarks.before.resolve`.
    rounds : int
        Rounds of a cell, at most.
    seed : int
        Seed of the random data.

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
        """Yield a row a cell, and print a line for each and one for each family.

        Parameters
        ----------
        names : iterable of str
            Names in `benchmarks.cells.FAMILIES`.
        head_dims : sequence of int, optional
            By default the head dims of the tables.
        seqs : sequence of int
        """
        l2_bytes = devices.current().l2_bytes
        with before.beside(self._older) as package:
            for name in names:
                found = []
                row_of = functools.partial(self._row, package, name)
                for row in rows_of(cases(name, head_dims, seqs, l2_bytes), row_of):
                    found.append(row)
                    yield row
                if found:
                    print(f"{name}: {_in_a_line(found)}", flush=True)

    def _row(self, package: ModuleType, family: str, case: Case) -> dict[str, Any] | None:
        try:
            ours, theirs = case.call(self._rng, (cufa, package))
            calls = {CUFA: ours, BEFORE: theirs}
            for call in calls.values():
                call()
            cupy.cuda.Device().synchronize()
        except Exception as error:  # the other cells can still be raced
            say(f"{case}: left out, for want of two to compare: {reason(error)}")
            self.failed += 1
            return None
        race, replayed = graphs.begin(calls, self._clock, "auto")
        if len(replayed) == 1:  # both or none
            race, replayed = graphs.begin(calls, self._clock, "events")
        race.run(Budget(rounds=self._rounds, contestant_ms=1000.0, least=10))
        us = 1e3 * race.median(BEFORE)
        # Not each one's own median: within a round the card's clock is the same for both.
        times = {CUFA: us / race.ratio(BEFORE, CUFA), BEFORE: us}
        return {
            "family": family,
            "label": case.label,
            **case.cell.row(),
            "kernel": TABLES[family].kernel or "auto" if family in TABLES else "auto",
            "unit": "us",
            **columns({name: rounded(time, 5) for name, time in times.items()}),
            **({"replayed": list(replayed)} if replayed else {}),
        }


def _in_a_line(rows: Sequence[dict[str, Any]]) -> str:
    cells, geomean, minimum, worst = summarise(rows)[BEFORE]
    mask = "causal" if worst["causal"] else "full"
    shape = f"D {worst['d']}, {mask}, {worst['b']} x {worst['sq']} x {worst['sk']}"
    return (
        f"{cells} cells, {geomean:.4f} times as fast as before in geometric mean, "
        f"{minimum:.4f} at least ({' '.join(filter(None, (worst['label'], shape)))})"
    )
