"""Tune: find the tiles that win for given problems on the current GPU, and keep them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from cufa import tuned
from cufa.checks import check_flag
from cufa.device import Device
from cufa.explorer.gradients import GradientsOf
from cufa.explorer.inputs import undrawn
from cufa.explorer.run import Progress, Run
from cufa.explorer.space import Space
from cufa.explorer.subject import Subject, duel_of, free_memory
from cufa.explorer.table import problem_text, tile_text
from cufa.planner.problem_class import ProblemClass
from cufa.planner.tuned_table import Entry
from cufa.problem.problem import Problem, checked
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

_FASTER = 1.01  # times that a winner is as fast, over the problems of its class together
_SLOWER = 1 / 1.01  # and at least for each of them


class Tuned(NamedTuple):
    """One problem that was tuned.

    Attributes
    ----------
    problem : Problem
    problem_class : ProblemClass
    planned : Variant
        The planner's choice without the user's table.
    planned_us : float
    winner : Variant
        The variant to run: `planned` where nothing is surely faster.
    winner_us : float
    ratio : float
        How many times as fast the winner is.
    """

    problem: Problem
    problem_class: ProblemClass
    planned: Variant
    planned_us: float
    winner: Variant
    winner_us: float
    ratio: float


@dataclass(eq=False)
class Tuning:
    """Problems that were tuned.

    Attributes
    ----------
    device : Device
    rows : list of Tuned
        Rows of the classes that are done.
    failures : dict of Problem to str
        Problems that could not be measured, and why.
    """

    device: Device
    rows: list[Tuned] = field(default_factory=list)
    failures: dict[Problem, str] = field(default_factory=dict)

    def entries(self) -> dict[ProblemClass, Entry]:
        """Return what to put into the user's table: the classes that have a new winner."""
        return {
            row.problem_class: entry_of(row.winner)
            for row in self.rows
            if row.winner != row.planned
        }

    def store(self, command: str) -> Path:
        """Put the entries into the user's table, and drop those that no longer win there.

        The table, whose path is returned, says what `command` found them; OSError where it cannot
        be written.
        """
        done = {row.problem_class for row in self.rows}
        return tuned.store(self.device, self.entries(), command, drop=done)

    def lines(self) -> list[tuple[str, ...]]:
        """Return headings and a line a problem as text; the last cell says what failed."""
        headings = ("problem", "planned", "us", "winner", "us", "ratio", "")
        rows = [
            (
                problem_text(row.problem),
                tile_text(row.planned),
                f"{row.planned_us:.1f}",
                tile_text(row.winner) if row.winner != row.planned else "stays",
                f"{row.winner_us:.1f}",
                f"{row.ratio:.3f}",
                "",
            )
            for row in self.rows
        ]
        failures = self.failures.items()
        failed = [(problem_text(p), *"-----", f"failed: {why}") for p, why in failures]
        return [headings, *rows, *failed]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold."""
        return {
            "device": self.device.name,
            "rows": [
                {
                    **row.problem.to_dict(),
                    "class": row.problem_class._asdict(),
                    "planned": str(row.planned),
                    "planned_us": round(row.planned_us, 3),
                    "winner": str(row.winner),
                    "winner_us": round(row.winner_us, 3),
                    "ratio": round(row.ratio, 4),
                }
                for row in self.rows
            ],
            "failures": [
                {**problem.to_dict(), "why": why} for problem, why in self.failures.items()
            ],
        }


def tune(
    tuning: Tuning,
    problems: Iterable[Problem],
    *,
    space: Space | None = None,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    on_problem: Callable[[int, int, Problem], None] | None = None,
    backward: bool = False,
) -> None:
    """Time variants for problems on the current GPU, and find what to run for each class of them.

    A variant wins a class if it is at least 1% faster over its problems, and for none of them more
    than 1% slower, than what the planner chooses without the user's table. The best one is
    measured once more, in many interleaved rounds. Nothing is stored: `Tuning.store` does that.

    Parameters
    ----------
    tuning : Tuning
        The tuning of the current GPU: results are added to it, also before an exception.
    problems : iterable of Problem
        Timed on random data, a bias and a mask included.
    space, jobs
        As in `cufa.explore`.
    progress : callable, optional
        Called with a `Progress` after each step of each problem's exploration.
    on_problem : callable, optional
        Called with the problems that were begun, their total, and the problem before each.
    backward : bool
        Tune the gradients by q, k and v instead: all launches of a call, whose sums have any order.

    Raises
    ------
    TypeError, ValueError
        As `cufa.explore`.
    """
    run = Run(jobs, progress)
    subject_of = GradientsOf if check_flag("backward", backward) else Subject
    distinct = list(dict.fromkeys(map(_known, problems)))
    classes: dict[ProblemClass, list[Subject]] = {}
    for problem in distinct:
        subject = subject_of(problem, tuning.device)
        classes.setdefault(subject.key(), []).append(subject)
    begun = itertools.count()
    for key, subjects in classes.items():
        timed: list[_Timed] = []
        for subject in subjects:
            if on_problem is not None:
                on_problem(next(begun), len(distinct), subject.problem)
            planned = subject.usual()
            run.build(subject, list(dict.fromkeys([planned, *subject.variants(None, space)])))
            try:
                run.measure()
                timed.append(_timed(run, key, planned))
            except (RuntimeError, MemoryError) as error:
                tuning.failures[subject.problem] = str(error)
            finally:
                free_memory()
        try:
            tuning.rows += _decided(run, timed)
        except (RuntimeError, MemoryError) as error:  # of a duel: the plan stays
            tuning.failures.update((row.problem, str(error)) for _, row, _ in timed)
            tuning.rows += [row for _, row, _ in timed]


def _known(problem: Problem) -> Problem:
    """Return a problem if a table can hold its like: with no part of the caller's own."""
    if missing := undrawn(problem):
        what = "sequences of unequal lengths" if missing == "lengths" else missing
        raise ValueError(f"problems: {what} cannot be tuned")
    return checked(problem)


_Timed = tuple[Subject, Tuned, dict[Entry, float]]
"""A problem, its row if nothing wins, and the microseconds of what a table can hold."""


def _timed(run: Run, key: ProblemClass, planned: Variant) -> _Timed:
    """Return the times of what a table can hold; RuntimeError if the planned variant failed."""
    subject, ours = run.subject, run.rows[planned]
    if ours.median_us is None or not ours.correct:
        raise RuntimeError(f"{planned}: {ours.error or '; '.join(ours.notes) or 'not timed'}")
    us = {
        entry_of(v): row.median_us
        for v, row in run.rows.items()
        if row.median_us is not None and subject.variant_of(entry_of(v)) == v
    }
    stays = ours.median_us
    return subject, Tuned(subject.problem, key, planned, stays, planned, stays, 1.0), us


def _decided(run: Run, timed: list[_Timed]) -> list[Tuned]:
    """Return a row for each problem of a class that was timed."""

    def relative(entry: Entry) -> float:
        return geometric_mean(us[entry] / row.planned_us for _, row, us in timed)

    shared = set.intersection(*(set(us) for _, _, us in timed)) if timed else set()
    best = min(sorted(shared), key=relative, default=None)
    if best is None or relative(best) >= 1:
        return [row for _, row, _ in timed]
    duels = [_duel(run, subject, row, best) for subject, row, _ in timed]
    ratios = [row.ratio for row in duels]
    if geometric_mean(ratios) >= _FASTER and min(ratios) >= _SLOWER:
        return duels
    return [d._replace(winner=d.planned, winner_us=d.planned_us, ratio=1.0) for d in duels]


def _duel(run: Run, subject: Subject, row: Tuned, entry: Entry) -> Tuned:
    """Return the row with another winner, timed against the planned variant."""
    winner = subject.variant_of(entry)
    if winner == row.planned:
        return row
    first, second = ((v, run.compiled[v][1]) for v in (row.planned, winner))
    try:
        ms, winner_ms, ratio = duel_of(subject, first, second)
    finally:
        free_memory()
    us, winner_us = 1e3 * ms, 1e3 * winner_ms
    return row._replace(planned_us=us, winner=winner, winner_us=winner_us, ratio=ratio)


def entry_of(variant: Variant) -> Entry:
    """Return a variant's part that a tuned table holds."""
    shape = TileShape._make(getattr(variant, name) for name in TileShape._fields)
    return Entry(variant.kernel, shape)
