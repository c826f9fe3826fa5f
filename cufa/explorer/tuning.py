"""What a tuning found: the winner of each problem, and the entries of the tuned table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from cufa.device import Device
from cufa.explorer.table import problem_text
from cufa.planner import tuned
from cufa.planner.problem_class import ProblemClass
from cufa.planner.tiles import TileShape
from cufa.planner.tuned_table import Entry
from cufa.problem import Problem
from cufa.variant import Variant


def entry_of(variant: Variant) -> Entry:
    """Return a variant's part that a tuned table holds."""
    shape = TileShape._make(getattr(variant, name) for name in TileShape._fields)
    return Entry(variant.kernel, shape)


class Tuned(NamedTuple):
    """One problem that was tuned.

    Attributes
    ----------
    problem : Problem
    problem_class : ProblemClass
    planned : Variant
        What the planner chooses without the user's table.
    planned_us : float
    winner : Variant
        What shall run: `planned` where nothing is surely faster.
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


class Tuning:
    """Problems that were tuned.

    Parameters
    ----------
    device : Device

    Attributes
    ----------
    rows : list of Tuned
        Of the classes that are done.
    failures : dict of Problem to str
        Problems that could not be measured, and why.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.rows: list[Tuned] = []
        self.failures: dict[Problem, str] = {}

    def entries(self) -> dict[ProblemClass, Entry]:
        """Return what to put into the user's table: the classes that have a new winner."""
        return {
            row.problem_class: entry_of(row.winner)
            for row in self.rows
            if row.winner != row.planned
        }

    def store(self, command: str) -> Path:
        """Put the entries into the user's table, and drop those that no longer win there.

        Parameters
        ----------
        command : str
            What found them, for the reader of the file.

        Returns
        -------
        Path
            The table.

        Raises
        ------
        OSError
        """
        return tuned.store(
            self.device, self.entries(), command, drop={row.problem_class for row in self.rows}
        )

    def __str__(self) -> str:
        """Return a line a problem, as plain text."""
        lines = [
            f"{problem_text(row.problem)}: {row.winner_us:.1f} us, {row.ratio:.3f} of "
            f"{row.planned_us:.1f} us; {row.winner}"
            if row.winner != row.planned
            else f"{problem_text(row.problem)}: {row.planned_us:.1f} us; {row.planned} stays"
            for row in self.rows
        ]
        lines += [f"{problem_text(problem)}: {why}" for problem, why in self.failures.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold."""
        return {
            "device": self.device.name,
            "rows": [
                {
                    **row.problem._asdict(),
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
                {**problem._asdict(), "why": why} for problem, why in self.failures.items()
            ],
        }
