"""The planner's loss: its choice against the fastest of the explorer's space."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from benchmarks import graphs
from benchmarks.cells import Cell
from benchmarks.contestants import reason, rounded, rows_of, say
from benchmarks.race import Race
from cufa import device as devices
from cufa.compiler.nvrtc import Compiled
from cufa.explorer.build import compile_all
from cufa.explorer.clock import Call, Clock, CudaClock
from cufa.explorer.oracle import Oracle
from cufa.explorer.race import Effort, knock_out
from cufa.explorer.space import variants
from cufa.explorer.subject import Stage, Subject
from cufa.planner.plan import plan_tiles
from cufa.specs.variant import Variant

QUICK = Effort(settle_rounds=6, final_rounds=4, busy_s=3.0)
"""Finds those that may be the fastest."""

FINALISTS = 4

ROUNDS = 30
"""Rounds of the finalists and the planner's choice. Earlier samples do not count, as a variant that
was lucky there need not be the fastest."""

_COMPILE_S = 2.0  # a variant on a core
_CELL_S = 3.5


class Regret:
    """Races of the planner's choice with the explorer's space, in one cell after the other.

    Parameters
    ----------
    cells : sequence of Cell
    seed : int
        The seed that drew the cells.
    kernels : sequence of str, optional
        Kernels whose variants are explored; by default the one that the planner takes.

    Attributes
    ----------
    failed : int
        Cells in which the planner's choice did not run, or not rightly.
    """

    def __init__(
        self, cells: Sequence[Cell], seed: int, kernels: Sequence[str] | None = None
    ) -> None:
        self._cells = cells
        self._seed = seed
        self._kernels = kernels
        self._device = devices.current()
        self._cubins: dict[Variant, bytes] = {}
        self.failed = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row a cell, and print a line for each; all is compiled before."""
        spaces = {cell: self._space(cell) for cell in self._cells}
        distinct = list(dict.fromkeys(v for space in spaces.values() for v in space))
        cores = os.cpu_count() or 1
        seconds = _COMPILE_S * len(distinct) / cores + _CELL_S * len(spaces)
        print(
            f"{len(spaces)} problems, {len(distinct)} variants to compile on {cores} cores: "
            f"some {seconds:.0f} s",
            flush=True,
        )
        self._compile(distinct)
        clock = CudaClock(rest_s=0)
        yield from rows_of(self._cells, lambda cell: self._row(cell, spaces[cell], clock))

    def _space(self, cell: Cell) -> list[Variant]:
        """Return the planner's choice, without a user's table, and behind it what is explored."""
        problem, device = cell.problem, self._device
        found = plan_tiles(problem, device).variant, *variants(problem, device, self._kernels)
        return list(dict.fromkeys(found))

    def _compile(self, distinct: Sequence[Variant]) -> None:
        started = time.perf_counter()
        with closing(compile_all(distinct, self._device.arch)) as results:
            for built in results:
                if isinstance(built.compiled, Compiled):
                    self._cubins[built.variant] = built.compiled.cubin
                else:
                    say(f"{built.variant} does not compile")
        print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)

    def _row(self, cell: Cell, space: Sequence[Variant], clock: Clock) -> dict[str, Any] | None:
        planned = space[0]
        stage = Stage(Subject(cell.problem, self._device))
        calls = self._ready(stage, cell, space)
        leaders = _leaders(calls, clock)
        right = _right(stage, cell, calls, [planned, *leaders])
        us = _careful({v: calls[v] for v in right}, planned, clock) if planned in right else {}
        if planned not in us:
            say(f"{cell}: left out, as the planner's choice is")
            self.failed += 1
            return None
        best = min(us, key=us.__getitem__)
        return {
            **cell.row(),
            "seed": self._seed,
            "variants": len(calls),
            "planned": str(planned),
            "planned_us": rounded(us[planned], 5),
            "best": str(best),
            "best_us": rounded(us[best], 5),
        }

    def _ready(self, stage: Stage, cell: Cell, space: Sequence[Variant]) -> dict[Variant, Call]:
        """Return the calls of those that run; each has."""
        calls = {}
        for variant in space:
            if variant not in self._cubins:
                continue
            try:
                call = stage.ready(variant, self._cubins[variant])
                stage.run(call)
            except (*stage.errors, ValueError) as error:
                say(f"{cell}: {variant} cannot: {reason(error)}")
            else:
                calls[variant] = call
        return calls


def _leaders(calls: Mapping[Variant, Call], clock: Clock) -> list[Variant]:
    """Return all by their times, quickly taken: those that are far behind leave at once."""
    race = Race(calls, clock)
    race.estimate()
    most = QUICK.hopeless * min(race.first_ms.values(), default=0.0)
    race.running = [variant for variant in calls if race.first_ms[variant] <= most]
    out = _replay(race)
    knock_out(race, lambda variant, time: None, QUICK)
    times = race.times()
    return sorted((v for v in times if v not in out), key=lambda variant: times[variant].ms)


def _replay(race: Race[Variant]) -> set[Variant]:
    """Replay all from now on; return those that no graph takes, and that are out of the race."""
    complaints = race.replay(graphs.capture)
    for variant, why in complaints.items():
        say(f"{variant} is left out: {why}")
    race.running = [variant for variant in race.running if variant not in complaints]
    return set(complaints)


def _right(
    stage: Stage, cell: Cell, calls: Mapping[Variant, Call], ranked: Sequence[Variant]
) -> list[Variant]:
    """Return the first of some variants and the `FINALISTS` next whose results are right."""
    oracle = Oracle(stage.xp, cell.problem, stage.inputs)
    right: list[Variant] = []
    for variant in dict.fromkeys(v for v in ranked if v in calls):
        if len(right) > FINALISTS:
            break
        stage.run(calls[variant])
        complaint = oracle.judge(stage.operands.out).complaint
        if complaint is None:
            right.append(variant)
        else:
            say(f"{cell}: {variant} is wrong: {complaint}")
    return right


def _careful(calls: Mapping[Variant, Call], planned: Variant, clock: Clock) -> dict[Variant, float]:
    """Return the microseconds of each by its ratio to the planner's choice; none without that."""
    race = Race(calls, clock)
    if planned in _replay(race):
        return {}
    for _ in range(ROUNDS):
        race.round()
    planned_us = 1e3 * race.median(planned)
    return {variant: planned_us * race.ratio(variant, planned) for variant in race.running}
