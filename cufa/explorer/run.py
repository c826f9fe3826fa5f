"""An exploration under way: compile, check, time, and at any moment what was found so far."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

from cufa.checks import check_integer
from cufa.compiler import nvrtc
from cufa.compiler.nvrtc import Compiled
from cufa.explorer import build
from cufa.explorer.clock import Call
from cufa.explorer.exploration import Exploration
from cufa.explorer.oracle import Verdict, same_bits
from cufa.explorer.race import Race, Time, knock_out
from cufa.explorer.result import Row
from cufa.explorer.subject import Stage, Subject
from cufa.explorer.work import shortest_s
from cufa.specs.variant import Variant


class Progress(NamedTuple):
    """A step of an exploration.

    Attributes
    ----------
    stage : {"compile", "check", "time"}
    done, total : int
        Steps of this stage.
    row : Row
        The finding of the step.
    """

    stage: str
    done: int
    total: int
    row: Row


class Run:
    """Explorations on one device, one after another; valid between any two steps.

    Parameters
    ----------
    jobs : int or None
        Threads that compile.
    progress : callable or None

    Attributes
    ----------
    subject : Subject
        That of the latest `build`.
    compiled : dict of Variant to (Row, bytes)
        The results of compiling, for each subject; without a cubin where that failed.
    rows : dict of Variant to Row
        The findings of each variant.
    ceilings : dict of str to float or None
        Ceilings of the GPU, measured before the race.
    lost : str or None
        Why nothing can be measured any more in this process: a variant broke the CUDA context.

    Raises
    ------
    TypeError, ValueError
    """

    subject: Subject

    def __init__(self, jobs: int | None, progress: Callable[[Progress], None] | None) -> None:
        if jobs is not None and check_integer("jobs", jobs, "an integer or None") < 1:
            raise ValueError(f"jobs must be at least 1, not {jobs}")
        if not (progress is None or callable(progress)):
            raise TypeError(f"progress must be callable or None, not {type(progress).__name__}")
        self._jobs, self._progress = jobs, progress
        self.compiled: dict[Variant, tuple[Row, bytes]] = {}
        self.rows: dict[Variant, Row] = {}
        self.ceilings: dict[str, float] | None = None
        self.lost: str | None = None
        self._started = time.perf_counter()

    def build(self, subject: Subject, chosen: list[Variant]) -> None:
        """Begin with a subject, and compile the variants that are legal."""
        self.subject, self._chosen = subject, chosen
        reasons = {v: subject.refusal(v) for v in chosen}
        self.rows = {v: Row(v, error=reason) for v, reason in reasons.items() if reason is not None}
        legal = [variant for variant in chosen if variant not in self.rows]
        missing = [variant for variant in legal if variant not in self.compiled]
        with closing(build.compile_all(missing, subject.device.arch, self._jobs)) as results:
            for done, built in enumerate(results, 1):
                row = build.static_row(built, subject.device)
                cubin = built.compiled.cubin if isinstance(built.compiled, Compiled) else b""
                self.compiled[row.variant] = row, cubin
                self._step("compile", done, len(missing), row)
        expected = subject.expected(legal)
        for variant in legal:
            row, _ = self.compiled[variant]
            self.rows[variant] = row._replace(expected_us=expected.get(variant))

    def measure(self) -> None:
        """Check the variants that were compiled one by one, then race those that are right.

        ValueError where q, k and v hold values that are not finite; RuntimeError if the context is
        lost.
        """
        if self.lost is not None:
            raise RuntimeError(f"not measured: {self.lost}")
        rows = [self.rows[variant] for variant in self._chosen]
        ready = [row for row in rows if row.error is None]
        if ready:
            stage = self.subject.stage()
            self._race(stage, self._check(stage, ready))

    def _check(self, stage: Stage, rows: list[Row]) -> dict[Variant, Call]:
        """Compare the result of each variant with the oracle; return the calls of right ones."""
        judge, calls = stage.judge(), {}
        for done, before in enumerate(rows, 1):
            row, call = self._checked(stage, judge, before)
            if call is not None:
                calls[row.variant] = call
            self._step("check", done, len(rows), row)
        return calls

    def _checked(
        self, stage: Stage, judge: Callable[..., Verdict], row: Row
    ) -> tuple[Row, Call | None]:
        """Run a variant twice; return its row with what came out, and its call if it is right."""
        if self.lost is not None:
            return row._replace(error=f"not measured: {self.lost}"), None
        try:
            call = stage.ready(row.variant, self.compiled[row.variant][1])
            stage.run(call)
            error, complaint = judge(*stage.results)
            if complaint is None:
                first = [each.copy() for each in stage.repeated]
                stage.run(call)
                if not all(map(same_bits, first, stage.repeated)):
                    complaint = "two launches give different results"
        except (*stage.errors, ValueError) as failure:
            try:  # has it passed, or does it stay with the CUDA context?
                stage.wait()
            except stage.errors as still:  # an illegal address, for one
                self.lost = f"{row.variant} broke the CUDA context ({_reason(still)})"
            return row._replace(error=_reason(failure)), None
        row = row._replace(correct=complaint is None, max_error=error)
        if complaint is not None:
            return row._replace(notes=(*row.notes, complaint)), None
        return row, call

    def _race(self, stage: Stage, calls: dict[Variant, Call]) -> None:
        """Time variants that are right; also after an exception, rows hold what is known then."""
        race: Race[Variant] | None = None
        done = itertools.count(1)

        def on_done(variant: Variant, time: Time) -> None:
            self._step("time", next(done), len(calls), self._timed(variant, time))

        try:
            if calls and self.lost is None:
                self.ceilings = stage.ceilings()
                race = Race(calls, stage.clock())
                knock_out(race, on_done)
        except stage.errors as error:  # what was timed until now is kept
            self.lost = f"the race broke off ({_reason(error)})"
        finally:
            times = {} if race is None else race.times()
            for variant in calls:
                if variant in times:
                    self.rows[variant] = self._timed(variant, times[variant])
                elif self.lost is not None:
                    why = f"not timed: {self.lost}"
                    self.rows[variant] = self.rows[variant]._replace(error=why)

    def _timed(self, variant: Variant, time: Time) -> Row:
        """Return a row with what follows from its time."""
        seconds = time.ms / 1e3
        operations, moved = self.subject.work()
        shortest = shortest_s(operations, moved, self.ceilings or {})
        return self.rows[variant]._replace(
            median_us=1e3 * time.ms,
            spread=time.spread,
            tflops=operations / seconds / 1e12,
            gbs=moved / seconds / 1e9,
            ceiling_fraction=None if shortest is None else shortest / seconds,
        )

    def _step(self, stage: str, done: int, total: int, row: Row) -> None:
        self.rows[row.variant] = row
        if self._progress is not None:
            self._progress(Progress(stage, done, total, row))

    def exploration(self) -> Exploration:
        """Return what was found."""
        major, minor = nvrtc.version()
        return Exploration(
            problem=self.subject.problem,
            device=self.subject.device,
            arch=self.subject.device.arch,
            rows=list(self.rows.values()),
            planned=self.subject.planned(self._chosen),
            compiler=f"NVRTC {major}.{minor}",
            ceilings=self.ceilings,
            seconds=time.perf_counter() - self._started,
            date=time.strftime("%Y-%m-%d"),
        )


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
