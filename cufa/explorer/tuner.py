"""One tuning under way: explore, compare, and decide class by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import geometric_mean

from cufa.device import Device
from cufa.explorer.measure import Measurement
from cufa.explorer.result import Row
from cufa.explorer.run import Progress, Run
from cufa.explorer.space import Space, variants
from cufa.explorer.tuning import Tuned, Tuning, entry_of
from cufa.planner.problem_class import ProblemClass
from cufa.planner.tuned_table import Entry
from cufa.problem import Problem
from cufa.variant import Variant

_FASTER = 1.01  # times that a winner is as fast, over the problems of its class together
_SLOWER = 1 / 1.01  # and at least for each of them


class Tuner:
    """Explores problem after problem, and keeps what was compiled for the ones to come.

    Parameters
    ----------
    device : Device
        The current GPU.
    kernels : list of str or None
    space : mapping, sequence or None
    jobs : int or None
        As in `cufa.explore`.
    progress : callable or None

    Attributes
    ----------
    tuning : Tuning
        What was found until now.
    """

    def __init__(
        self,
        device: Device,
        kernels: list[str] | None,
        space: Space | None,
        jobs: int | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._space = space
        self._jobs = jobs
        self._progress = progress
        self._compiled: dict[Variant, tuple[Row, bytes | None]] = {}
        self._lost: str | None = None
        self.tuning = Tuning(device)

    def explore(self, problem: Problem, planned: Variant) -> dict[Entry, float]:
        """Return the microseconds of what a table can hold, or nothing if `planned` failed."""
        chosen = dict.fromkeys(
            [planned, *variants(problem, self._device, self._kernels, self._space)]
        )
        run = Run(problem, self._device, self._device.arch, self._progress, self._compiled)
        run.build(list(chosen), self._jobs)
        try:
            if self._lost is not None:
                raise RuntimeError(f"not measured: {self._lost}")
            run.measure(None)
        except (RuntimeError, MemoryError) as error:
            self.tuning.failures[problem] = str(error)
            return {}
        finally:
            _free_memory()
        self._lost = run.lost
        found = {row.variant: row for row in run.rows}
        ours = found[planned]
        if ours.median_us is None or not ours.correct:
            why = ours.error or "; ".join(ours.notes) or "not timed"
            self.tuning.failures[problem] = f"{planned}: {why}"
            return {}
        return {
            entry_of(variant): row.median_us
            for variant, row in found.items()
            if row.median_us is not None
            and entry_of(variant).variant(problem, self._device) == variant
        }

    def decide(
        self,
        key: ProblemClass,
        planned: Mapping[Problem, Variant],
        times: Mapping[Problem, Mapping[Entry, float]],
    ) -> list[Tuned]:
        """Return a row for each problem of a class that was timed."""
        rows = {
            problem: _stays(problem, key, planned[problem], found[entry_of(planned[problem])])
            for problem, found in times.items()
        }
        shared = set.intersection(*(set(found) for found in times.values())) if times else set()

        def relative(entry: Entry) -> float:
            return geometric_mean(times[p][entry] / rows[p].planned_us for p in rows)

        best = min(sorted(shared), key=relative, default=None)
        if best is None or relative(best) >= 1:
            return list(rows.values())
        try:
            duels = {problem: self._duel(row, best) for problem, row in rows.items()}
        except (RuntimeError, MemoryError) as error:
            self.tuning.failures.update(dict.fromkeys(rows, str(error)))
            return list(rows.values())
        ratios = [row.ratio for row in duels.values()]
        if geometric_mean(ratios) >= _FASTER and min(ratios) >= _SLOWER:
            return list(duels.values())
        return [_stays(problem, key, row.planned, row.planned_us) for problem, row in duels.items()]

    def _duel(self, row: Tuned, entry: Entry) -> Tuned:
        """Return the row with another winner, timed against the planned variant."""
        winner = entry.variant(row.problem, self._device)
        if winner == row.planned:
            return row
        try:
            found = Measurement(row.problem, None, self._device).duel(
                (row.planned, self._cubin(row.planned)), (winner, self._cubin(winner))
            )
        finally:
            _free_memory()
        return row._replace(
            planned_us=1e3 * found.first_ms,
            winner=winner,
            winner_us=1e3 * found.second_ms,
            ratio=found.ratio,
        )

    def _cubin(self, variant: Variant) -> bytes:
        cubin = self._compiled[variant][1]
        if cubin is None:
            raise KeyError(variant)
        return cubin


def _stays(problem: Problem, key: ProblemClass, planned: Variant, planned_us: float) -> Tuned:
    return Tuned(problem, key, planned, planned_us, planned, planned_us, 1.0)


def _free_memory() -> None:
    """Return cached memory, which is of little use to the next problem's other shapes."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
