"""The findings of an exploration: a row a variant, the best first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from cufa.device import Device
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant


class Row(NamedTuple):
    """One variant of an exploration; what is not known is None.

    Attributes
    ----------
    variant : Variant
    error : str or None
        Why it is illegal, does not compile or does not launch.
    notes : tuple of str
        Remarks of ptxas on the treatment of wgmma, each with its code, such as C7512.
    registers, spill_bytes : int or None
        A thread's.
    static_smem_bytes, dynamic_smem_bytes : int or None
        Shared memory of a block.
    blocks_per_sm : int or None
        Blocks that a multiprocessor holds together.
    occupancy : float or None
        Share of a multiprocessor's threads that they fill.
    code_bytes : int or None
        Size of the instructions.
    compile_s : float or None
        Seconds, while other variants are compiled.
    expected_us : float or None
        Time of a call that the planner expects on an H200.
    correct : bool or None
    max_error : float or None
        Largest absolute difference from the oracle.
    median_us, spread : float or None
        Time of a call, and the interquartile range of its samples relative to it.
    tflops, gbs : float or None
        Operations, and bytes of Q, K, V and O, by time.
    ceiling_fraction : float or None
        The share of the speed that the measured ceilings allow for the problem.
    """

    variant: Variant
    error: str | None = None
    notes: tuple[str, ...] = ()
    registers: int | None = None
    spill_bytes: int | None = None
    static_smem_bytes: int | None = None
    dynamic_smem_bytes: int | None = None
    blocks_per_sm: int | None = None
    occupancy: float | None = None
    code_bytes: int | None = None
    compile_s: float | None = None
    expected_us: float | None = None
    correct: bool | None = None
    max_error: float | None = None
    median_us: float | None = None
    spread: float | None = None
    tflops: float | None = None
    gbs: float | None = None
    ceiling_fraction: float | None = None


def ranked(rows: list[Row]) -> list[Row]:
    """Return rows in order: timed ones, untimed ones, wrong ones, errors.

    The fastest come first, untimed ones by the time that the planner expects; those of which it
    expects none follow by spills and occupancy.
    """

    def place(row: Row) -> tuple[Any, ...]:
        if row.error is not None:
            return 3, row.variant
        if row.correct is False:
            return 2, row.variant
        if row.median_us is not None:
            return 0, row.median_us, row.variant
        if row.expected_us is not None:
            return 1, row.expected_us, row.variant
        costs = row.spill_bytes or 0, -(row.occupancy or 0.0), row.registers or 0
        return 1, math.inf, *costs, row.variant

    return sorted(rows, key=place)


@dataclass(repr=False, eq=False, kw_only=True)
class Findings:
    """The data of an `Exploration`, which says what they are."""

    problem: Problem
    device: Device
    arch: str
    rows: list[Row]
    planned: Variant
    compiler: str
    ceilings: dict[str, float] | None
    seconds: float
    date: str

    def __post_init__(self) -> None:
        """Bring the rows into order."""
        self.rows = ranked(self.rows)

    @property
    def best(self) -> Row | None:
        """The fastest variant that is correct, or None where nothing was timed."""
        timed = (row for row in self.rows if row.median_us is not None and row.error is None)
        return next((row for row in timed if row.correct is not False), None)
