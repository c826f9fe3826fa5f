"""Gradients of a problem, as `Run` explores them: tiles, and arrays on the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from cufa.api.attention import attention
from cufa.arrays import Operands
from cufa.device import Device
from cufa.explorer import work
from cufa.explorer.clock import Call
from cufa.explorer.gradient_oracle import GradientOracle
from cufa.explorer.score_inputs import ScoreInputs
from cufa.explorer.space import Space, checked_space
from cufa.explorer.stage import Stage
from cufa.explorer.subject import Judge, Subject
from cufa.features.dropout import Dropout
from cufa.features.parts import ARRAYS
from cufa.features.random_arrays import normal
from cufa.launch import backward
from cufa.planner.backward import BackwardPlan
from cufa.planner.backward_model import explained, flops
from cufa.planner.problem_class import ProblemClass, gradient_class
from cufa.planner.tuned_table import Entry, Table
from cufa.problem.extras import Extras
from cufa.problem.parse_backward import TENSORS, Gradients, Results
from cufa.problem.problem import Problem
from cufa.specs import BACKWARD_KERNELS
from cufa.specs.backward_variant import BackwardVariant
from cufa.specs.variant import Variant
from cufa.tuned import user_table

_AXES = ("bm", "bn", "stages", "warps", "blocks_per_sm")


def variants(problem: Problem, device: Device, space: Mapping[str, Sequence[int]]) -> list[Variant]:
    """Return the tiles of the kernel's spec, of all head dims, that are legal for a problem.

    Parameters
    ----------
    problem : Problem
    device : Device
    space : mapping of str to sequence of int
        Values of template arguments, which take the place of those of each tile.

    Raises
    ------
    ValueError
        A template argument is unknown, or nothing legal is left.
    """
    unknown = [name for name in space if name not in _AXES]
    if unknown:
        raise ValueError(f"space: {unknown[0]!r} is none of {', '.join(_AXES)}, of gradients")
    first = GradientsOf(problem, device).planned(())
    tables = BACKWARD_KERNELS[first.kernel].tile_tables.values()
    shapes = [shape._asdict() for table in tables for tiles in table.values() for shape in tiles]
    tiles = [first, *(first._replace(**shape) for shape in shapes)]
    values: list[dict[str, Any]] = [
        dict(zip(space, each, strict=True)) for each in itertools.product(*space.values())
    ]
    found = dict.fromkeys(tile._replace(**each) for tile in tiles for each in values)
    legal = [variant for variant in found if variant.illegal(device) is None]
    if not legal:
        raise ValueError(f"space: nothing legal is left on {device.name}")
    return legal


class GradientsOf(Subject):
    """The gradients of q, k and v of a problem on a device."""

    def refusal(self, variant: Variant) -> str | None:
        """Return why a variant cannot run, or None if it can."""
        return variant.illegal(self.device)

    def variants(self, kernels: Iterable[str] | None, space: Space | None) -> list[Variant]:
        """Return the variants to explore: those of `variants`."""
        if kernels is not None:
            raise ValueError("kernels: a dtype has one kernel of gradients: leave them out")
        values = {} if space is None else space
        if not isinstance(values, Mapping):
            raise TypeError("space: with backward it must map template arguments to values")
        return variants(self.problem, self.device, checked_space(values))

    def expected(self, variants: Collection[Variant]) -> dict[Variant, float]:
        """Return the microseconds that are expected of the planner's choice, where known."""
        found, first = self._plan(user_table(self.device)), self.planned(())
        return {first: sum(found.expected_us)} if found.expected_us and first in variants else {}

    def planned(self, kernels: Collection[str]) -> Variant:
        """Return the planner's choice."""
        return BackwardVariant(*self._plan(user_table(self.device)).variant)

    def usual(self) -> Variant:
        """Return the planner's choice without the user's table."""
        return BackwardVariant(*self._plan(None).variant)

    def key(self) -> ProblemClass:
        """Return the class that a tuned table has the gradients in."""
        found = self._plan(None)
        head_dims = found.variant.head_dim, found.variant.head_dim_v
        return gradient_class(found.problem, self.device, head_dims)

    def variant_of(self, entry: Entry) -> Variant:
        """Return the instantiation of an entry of a tuned table; it may be illegal."""
        return self.usual()._replace(kernel=entry.kernel, **entry.shape._asdict())

    def _plan(self, table: Table | None) -> BackwardPlan:
        return explained(self.problem, self.device, TENSORS, deterministic=False, table=table)

    def stage(self, operands: Operands | None, inputs: ScoreInputs | None) -> Stage:
        """Return the problem on the current GPU."""
        return GradientStage(self.problem, operands, self.device, inputs)

    def judge(self, stage: Stage) -> Judge:
        """Return the judge of results of a stage."""
        assert isinstance(stage, GradientStage)
        return GradientOracle(stage.xp, self.problem, stage.arrays, stage.inputs)

    def flops(self) -> float:
        """Return the operations of the five products."""
        return flops(self.problem)

    def nbytes(self) -> int:
        """Return the bytes of Q, K, V, O and their gradients, each moved once."""
        return 2 * work.nbytes(self.problem)


class GradientStage(Stage):
    """Runs the gradients of a problem on the current GPU; see `Stage`.

    Attributes
    ----------
    arrays : tuple of array
        dout, q, k and v.
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands | None,
        device: Device,
        inputs: ScoreInputs | None,
    ) -> None:
        super().__init__(problem, operands, device, inputs)
        q, k, v, out = self.operands[:4]
        dout = normal(self.xp, out.shape, out.dtype, seed=3)
        self.arrays = dout, q, k, v
        seed = None if problem.of(Dropout) is None else self.inputs.seed
        options = {**problem.asked, **self.inputs.arrays, "scale": problem.scale, "seed": seed}
        given, lse = attention(q, k, v, return_lse=True, **options)
        self.results = self.written = tuple(self.xp.empty(x.shape, x.dtype) for x in (q, k, v))
        self.repeated = self.results[1:]  # blocks add to dq in any order
        self._backward = partial(
            backward.attention_backward,
            problem._replace(returns_lse=True),
            self.operands,
            Results(dout, given, lse),
            Gradients(*self.results),
            Extras(tuple(map(self.inputs.arrays.get, ARRAYS)), seed=seed),
            deterministic=False,
        )

    def ready(self, variant: Variant, cubin: bytes) -> Call:
        """Return a call of the gradients by a variant, compiled in this process."""
        return partial(self._backward, forced=variant)
