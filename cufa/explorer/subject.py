"""The subject of an exploration: attention, or its gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from cufa.arrays import Operands
from cufa.device import Device
from cufa.explorer import stage as stages
from cufa.explorer.race import Duel, duel
from cufa.explorer.score_inputs import ScoreInputs
from cufa.explorer.space import Space, variants
from cufa.explorer.work import flops, nbytes
from cufa.planner.plan import plan_tiles
from cufa.planner.problem_class import ProblemClass, problem_class
from cufa.planner.rules import times
from cufa.planner.tuned_table import Entry
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant
from cufa.tuned import user_table


class Subject:
    """Attention of a problem on a device, as `Run` explores it.

    Parameters
    ----------
    problem : Problem
    device : Device
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        self.problem, self.device = problem, device

    def refusal(self, variant: Variant) -> str | None:
        """Return why a variant cannot run, or None if it can."""
        try:
            plan_tiles(self.problem, self.device, variant)
        except ValueError as error:
            return str(error).removeprefix(f"kernel: {variant!r}: ")
        return None

    def variants(self, kernels: Iterable[str] | None, space: Space | None) -> list[Variant]:
        """Return the variants to explore, as `cufa.explorer.space.variants`."""
        return variants(self.problem, self.device, kernels, space)

    def expected(self, variants: Collection[Variant]) -> dict[Variant, float]:
        """Return the microseconds that are expected of variants, as far as they are known."""
        found: dict[Variant, float] = {}
        for kernel in {variant.kernel for variant in variants}:
            found |= times(self.problem, self.device, kernel)
        return found

    def planned(self, kernels: Collection[str]) -> Variant:
        """Return the planner's choice; with a kernel forced if only others are explored."""
        table = user_table(self.device)
        usual = plan_tiles(self.problem, self.device, table=table).variant
        if usual.kernel in kernels:
            return usual
        for kernel in kernels:
            with suppress(ValueError):  # one that cannot run the problem
                return plan_tiles(self.problem, self.device, kernel, table).variant
        return usual

    def usual(self) -> Variant:
        """Return the planner's choice without the user's table."""
        return plan_tiles(self.problem, self.device).variant

    def key(self) -> ProblemClass:
        """Return the class that a tuned table has the problem in."""
        return problem_class(self.problem, self.device)

    def variant_of(self, entry: Entry) -> Variant:
        """Return the instantiation of an entry of a tuned table; it may be illegal."""
        return entry.variant(self.problem, self.device)

    def stage(
        self, operands: Operands | None = None, inputs: ScoreInputs | None = None
    ) -> stages.Stage:
        """Return the problem on the current GPU, with arrays as in `Run.measure`."""
        return stages.Stage(self.problem, operands, self.device, inputs)

    def work(self) -> tuple[float, int]:
        """Return the operations of a call, and the bytes that it moves at least."""
        return flops(self.problem), nbytes(self.problem)


def duel_of(subject: Subject, first: tuple[Variant, bytes], second: tuple[Variant, bytes]) -> Duel:
    """Time two variants, and their cubins, against each other on a warm card."""
    stage = subject.stage()
    calls = stage.ready(*first), stage.ready(*second)
    for call in calls:
        stage.run(call)
    return duel(*calls, stage.clock(rest_s=0))
