"""Check and time the compiled variants of one problem on the current GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from cufa.arrays import Operands
from cufa.device import Device
from cufa.explorer.clock import Call
from cufa.explorer.knockout import knock_out
from cufa.explorer.oracle import Oracle, same_bits
from cufa.explorer.race import Duel, Race, Time, duel
from cufa.explorer.result import Row
from cufa.explorer.stage import Stage
from cufa.explorer.work import flops, nbytes
from cufa.problem import Problem
from cufa.variant import Variant


def memory_bound(problem: Problem, ceilings: dict[str, float]) -> bool:
    """Whether a problem has fewer operations a byte than the card; True where that is unknown."""
    if "gemm_tflops" not in ceilings:
        return True
    ridge = 1e3 * ceilings["gemm_tflops"] / ceilings["read_gbs"]
    return flops(problem) / nbytes(problem) < ridge


def timed(row: Row, time: Time, problem: Problem, ceilings: dict[str, float]) -> Row:
    """Return a row with what follows from its time."""
    seconds = time.ms / 1e3
    fraction = None
    if "gemm_tflops" in ceilings:
        by_products = flops(problem) / (1e12 * ceilings["gemm_tflops"])
        by_memory = nbytes(problem) / (1e9 * ceilings["read_gbs"])
        fraction = max(by_products, by_memory) / seconds
    return row._replace(
        median_us=1e3 * time.ms,
        spread=time.spread,
        tflops=flops(problem) / seconds / 1e12,
        gbs=nbytes(problem) / seconds / 1e9,
        ceiling_fraction=fraction,
    )


class Measurement:
    """Checks variants one by one, then races those that are right.

    Parameters
    ----------
    problem : Problem
        With at least one query and one key.
    operands : Operands or None
        4-D CuPy arrays; None for random ones.
    device : Device
        The current GPU.

    Attributes
    ----------
    ceilings : dict of str to float or None
        ``read_gbs``, ``copy_gbs`` and, where cuBLAS is installed, ``gemm_tflops``; measured by the
        race.
    lost : str or None
        Why nothing can be measured any more in this process: a variant broke the CUDA context.
    """

    def __init__(self, problem: Problem, operands: Operands | None, device: Device) -> None:
        self._problem = problem
        self._stage = Stage(problem, operands, device)
        self._calls: dict[Variant, Call] = {}
        self._rows: list[Row] = []
        self._race: Race[Variant] | None = None
        self.ceilings: dict[str, float] | None = None
        self.lost: str | None = None

    @functools.cached_property
    def _oracle(self) -> Oracle:
        return Oracle(self._stage.xp, self._problem, *self._stage.operands[:3])

    def check(self, row: Row, cubin: bytes) -> Row:
        """Run a variant twice and compare with the oracle.

        Returns
        -------
        Row
            With `correct` and `max_error`, or with the error of its launch.

        Raises
        ------
        ValueError
            The inputs hold values that are not finite.
        """
        oracle = self._oracle
        if self.lost is not None:
            return row._replace(error=f"not measured: {self.lost}")
        out = self._stage.operands.out
        try:
            call = self._stage.ready(row.variant, cubin)
            self._run(call)
            verdict = oracle.judge(out)
            complaint = verdict.complaint
            if complaint is None:
                first = out.copy()
                self._run(call)
                if not same_bits(self._stage.xp, first, out):
                    complaint = "two launches give different results"
        except (*self._stage.errors, ValueError) as error:
            self._mind(row.variant)
            return row._replace(error=_reason(error))
        if complaint is not None:
            notes = (*row.notes, complaint)
            return row._replace(correct=False, max_error=verdict.max_error, notes=notes)
        self._calls[row.variant] = call
        return row._replace(correct=True, max_error=verdict.max_error)

    def _run(self, call: Call) -> None:
        self._stage.poison()
        call()
        self._stage.wait()

    def _mind(self, variant: Variant) -> None:
        """Find out whether an error has passed, or stays with the CUDA context."""
        try:
            self._stage.wait()
        except (
            self._stage.errors
        ) as error:  # an illegal address, for one, ends all work of the process
            self.lost = f"{variant} broke the CUDA context ({_reason(error)})"

    def race(self, rows: Iterable[Row], on_row: Callable[[Row], None]) -> list[Row]:
        """Time rows that passed `check`.

        Parameters
        ----------
        rows : iterable of Row
        on_row : callable
            Called once with each row, when its time is known.

        Returns
        -------
        list of Row
            As the property `rows` holds them at any time, also after an exception.
        """
        self._rows = list(rows)
        if self.lost is not None:
            self._rows = [row._replace(error=f"not timed: {self.lost}") for row in self._rows]
        racing = {row.variant: row for row in self._rows if row.error is None}
        if not racing:
            return self.rows
        try:
            self.ceilings = self._stage.ceilings()
            clock = self._stage.clock(memory_bound(self._problem, self.ceilings))
            self._race = Race({variant: self._calls[variant] for variant in racing}, clock)
            knock_out(
                self._race,
                lambda variant, time: on_row(self._timed(racing[variant], {variant: time})),
            )
        except self._stage.errors as error:  # what was timed until now is kept
            self.lost = f"the race broke off ({_reason(error)})"
        return self.rows

    @property
    def rows(self) -> list[Row]:
        """The rows of the race, with the times that are known."""
        times = {} if self._race is None else self._race.times()
        return [self._timed(row, times) for row in self._rows]

    def _timed(self, row: Row, times: dict[Variant, Time]) -> Row:
        if row.variant in times and self.ceilings is not None:
            return timed(row, times[row.variant], self._problem, self.ceilings)
        if row.error is None and self.lost is not None:
            return row._replace(error=f"not timed: {self.lost}")
        return row

    def duel(self, first: tuple[Variant, bytes], second: tuple[Variant, bytes]) -> Duel:
        """Time two variants, and their cubins, against each other on a warm card."""
        ours, theirs = self._stage.ready(*first), self._stage.ready(*second)
        for call in (ours, theirs):
            call()
        self._stage.wait()
        clock = self._stage.clock(memory_bound(self._problem, self._stage.ceilings()), rest_s=0)
        return duel(ours, theirs, clock)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
