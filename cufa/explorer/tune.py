"""Find the tiles that win for given problems on the current GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from cufa import device as devices
from cufa.explorer import arguments
from cufa.explorer.run import Progress
from cufa.explorer.space import Space
from cufa.explorer.standard import standard_problems
from cufa.explorer.tuner import Tuner
from cufa.explorer.tuning import Tuned, Tuning
from cufa.planner import tuned
from cufa.planner.plan import plan
from cufa.planner.problem_class import ProblemClass
from cufa.problem import Problem, checked
from cufa.variant import Variant

__all__ = ["Interrupted", "Tuned", "Tuning", "standard_problems", "tune"]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a tuning.

    Attributes
    ----------
    tuning : Tuning
        The classes that were done.
    """

    def __init__(self, tuning: Tuning) -> None:
        super().__init__(f"interrupted after {len(tuning.rows)} problems")
        self.tuning = tuning


def tune(
    problems: Iterable[Problem],
    *,
    kernels: Iterable[str] | None = None,
    space: Space | None = None,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    on_problem: Callable[[int, int, Problem], None] | None = None,
) -> Tuning:
    """Time variants for problems on the current GPU, and find what to run for each class of them.

    A variant wins a class if it is at least 1% faster over its problems, and for none of them more
    than 1% slower, than what the planner chooses without the user's table. That is measured once
    more for the best one, in many interleaved rounds. Nothing is stored: `Tuning.store` does that.

    Parameters
    ----------
    problems : iterable of Problem
    kernels, space, jobs
        As in `cufa.explore`.
    progress : callable, optional
        Called with a `Progress` after each step of each problem's exploration.
    on_problem : callable, optional
        Called with the problems that were begun, their total, and the problem before each.

    Raises
    ------
    TypeError, ValueError
        As `cufa.explore`.
    Interrupted
        On Ctrl-C, with what was found so far.
    """
    from cupy.cuda import runtime

    names = arguments.checked_kernels(kernels)
    arguments.check(jobs, progress)
    distinct = list(dict.fromkeys(checked(problem) for problem in problems))
    device = devices.of_id(runtime.getDevice())
    tuner = Tuner(device, names, space, jobs, progress)
    classes: dict[ProblemClass, dict[Problem, Variant]] = {}
    with _without_users_table():
        for problem in distinct:
            key = tuned.problem_class(problem, device)
            classes.setdefault(key, {})[problem] = plan(problem, device).variant
    begun = 0
    try:
        for key, planned in classes.items():
            times = {}
            for problem, variant in planned.items():
                if on_problem is not None:
                    on_problem(begun, len(distinct), problem)
                begun += 1
                found = tuner.explore(problem, variant)
                if found:
                    times[problem] = found
            tuner.tuning.rows += tuner.decide(key, planned, times)
    except KeyboardInterrupt:
        raise Interrupted(tuner.tuning) from None
    return tuner.tuning


@contextmanager
def _without_users_table() -> Iterator[None]:
    before = os.environ.get("CUFA_TUNED")
    os.environ["CUFA_TUNED"] = "0"
    tuned.forget()
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUFA_TUNED"]
        else:
            os.environ["CUFA_TUNED"] = before
        tuned.forget()
