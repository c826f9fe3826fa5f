"""An exploration under way: compile, check, time, and at any moment what was found so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import NamedTuple

from cufa.arrays import Operands
from cufa.compiler.nvrtc import Compiled
from cufa.device import Device
from cufa.explorer import build
from cufa.explorer.exploration import Exploration
from cufa.explorer.result import Row
from cufa.planner.plan import plan
from cufa.problem import Problem
from cufa.variant import Variant


class Progress(NamedTuple):
    """A step of an exploration.

    Attributes
    ----------
    stage : {"compile", "check", "time"}
    done, total : int
        Steps of this stage.
    row : Row
        What the step found.
    """

    stage: str
    done: int
    total: int
    row: Row


class Run:
    """An exploration under way: its state is valid between any two steps.

    Parameters
    ----------
    problem : Problem
    device : Device
    arch : str
    progress : callable or None
    compiled : dict of Variant to (Row, bytes or None), optional
        What earlier explorations on the device have compiled; this one adds to it.

    Attributes
    ----------
    lost : str or None
        The error that has made the GPU useless for this process.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        arch: str,
        progress: Callable[[Progress], None] | None,
        compiled: dict[Variant, tuple[Row, bytes | None]] | None = None,
    ) -> None:
        self._problem = problem
        self._device = device
        self._arch = arch
        self._progress = progress
        self._compiled = {} if compiled is None else compiled
        self._rows: dict[Variant, Row] = {}
        self._cubins: dict[Variant, bytes] = {}
        self._kernels: list[str] = []
        self.lost: str | None = None
        self._ceilings: dict[str, float] | None = None
        self._started = time.perf_counter()

    def build(self, chosen: list[Variant], jobs: int | None) -> None:
        """Compile the variants that are legal."""
        self._kernels = list(dict.fromkeys(variant.kernel for variant in chosen))
        legal = []
        for variant in chosen:
            reason = build.refusal(self._problem, variant, self._device)
            if reason is None:
                legal.append(variant)
            else:
                self._rows[variant] = Row(variant, error=reason)
        missing = [variant for variant in legal if variant not in self._compiled]
        with closing(build.compile_all(missing, self._arch, jobs)) as results:
            for done, built in enumerate(results, 1):
                row = build.static_row(built, self._device)
                cubin = built.compiled.cubin if isinstance(built.compiled, Compiled) else None
                self._compiled[row.variant] = (row, None if row.error else cubin)
                self._step("compile", done, len(missing), row)
        for variant in legal:
            self._rows[variant], cubin = self._compiled[variant]
            if cubin is not None:
                self._cubins[variant] = cubin

    def measure(self, operands: Operands | None) -> None:
        """Check and time the variants that were compiled."""
        from cufa.explorer.measure import Measurement

        measurement = Measurement(self._problem, operands, self._device)
        total = len(self._cubins)
        for done, (variant, cubin) in enumerate(self._cubins.items(), 1):
            self._step("check", done, total, measurement.check(self._rows[variant], cubin))
        sound = [row for row in self._rows.values() if row.correct]
        timed = 0

        def on_row(row: Row) -> None:
            nonlocal timed
            timed += 1
            self._step("time", timed, len(sound), row)

        try:
            measurement.race(sound, on_row)
        finally:
            self._rows.update((row.variant, row) for row in measurement.rows)
            self._ceilings = measurement.ceilings
            self.lost = measurement.lost

    @property
    def rows(self) -> list[Row]:
        """What is known of each variant."""
        return list(self._rows.values())

    def _step(self, stage: str, done: int, total: int, row: Row) -> None:
        self._rows[row.variant] = row
        if self._progress is not None:
            self._progress(Progress(stage, done, total, row))

    def exploration(self) -> Exploration:
        """Return what was found."""
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
        return Exploration(
            problem=self._problem,
            device=self._device,
            arch=self._arch,
            rows=self.rows,
            planned=self._planned(),
            compiler=f"NVRTC {major}.{minor}",
            ceilings=self._ceilings,
            seconds=time.perf_counter() - self._started,
            date=time.strftime("%Y-%m-%d"),
        )

    def _planned(self) -> Variant:
        """Return the planner's choice; with a kernel forced if only others are explored."""
        usual = plan(self._problem, self._device).variant
        if usual.kernel in self._kernels:
            return usual
        for kernel in self._kernels:
            with suppress(ValueError):  # one that cannot run the problem
                return plan(self._problem, self._device, kernel).variant
        return usual
