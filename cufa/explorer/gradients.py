"""Gradients of a problem, as `Run` explores them: tiles, and arrays on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from cufa.api.attention import attention
from cufa.explorer.clock import Call
from cufa.explorer.gradient_oracle import GradientOracle
from cufa.explorer.oracle import Verdict
from cufa.explorer.space import Space, checked_space, combinations
from cufa.explorer.subject import Stage, Subject
from cufa.explorer.work import nbytes
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
from cufa.specs import BACKWARD_KERNELS
from cufa.specs.template_arguments import NUMBERS
from cufa.specs.variant import BackwardVariant, Variant
from cufa.tuned import user_table


class GradientsOf(Subject):
    """The gradients of q, k and v of a problem on a device."""

    def refusal(self, variant: Variant) -> str | None:
        """Return why a variant cannot run, or None if it can."""
        return variant.illegal(self.device)

    def variants(self, kernels: Iterable[str] | None, space: Space | None) -> list[Variant]:
        """Return the tiles of the kernel's spec, of all head dims, that are legal.

        Values of `space` take the place of those of each tile.
        """
        if kernels is not None:
            raise ValueError("kernels: a dtype has one kernel of gradients: leave them out")
        space = {} if space is None else space
        if not isinstance(space, Mapping):
            raise TypeError("space: with backward it must map template arguments to values")
        values = list(combinations(checked_space(space, NUMBERS[2:], ", of gradients")))
        first = self.planned(())
        tables = BACKWARD_KERNELS[first.kernel].tile_tables.values()
        shapes = (shape for table in tables for tiles in table.values() for shape in tiles)
        tiles = [first, *(first._replace(**shape._asdict()) for shape in shapes)]
        found = dict.fromkeys(tile._replace(**each) for tile in tiles for each in values)
        legal = [variant for variant in found if variant.illegal(self.device) is None]
        if not legal:
            raise ValueError(f"space: nothing legal is left on {self.device.name}")
        return legal

    def expected(self, variants: Collection[Variant]) -> dict[Variant, float]:
        """Return the microseconds that are expected of the planner's choice, where known."""
        table = user_table(self.device)
        found, first = self._plan(table), self.usual(table)
        return {first: sum(found.expected_us)} if found.expected_us and first in variants else {}

    def key(self) -> ProblemClass:
        """Return the class that a tuned table has the gradients in."""
        found = self._plan(None)
        head_dims = found.variant.head_dim, found.variant.head_dim_v
        return gradient_class(found.problem, self.device, head_dims)

    def variant_of(self, entry: Entry) -> Variant:
        """Return the instantiation of an entry of a tuned table; it may be illegal."""
        return self.usual()._replace(kernel=entry.kernel, **entry.shape._asdict())

    def usual(self, table: Table | None = None) -> Variant:
        """Return the planner's choice by a tuned table, or without one."""
        return BackwardVariant(*self._plan(table).variant)

    def _plan(self, table: Table | None) -> BackwardPlan:
        return explained(self.problem, self.device, TENSORS, deterministic=False, table=table)

    def stage(self) -> Stage:
        """Return the problem on the current GPU."""
        return GradientStage(self)

    def work(self) -> tuple[float, int]:
        """Return the operations of the five products, and the bytes of all arrays, moved once."""
        return flops(self.problem), 2 * nbytes(self.problem)


class GradientStage(Stage):
    """Runs the gradients of a problem on the current GPU, of random arrays; see `Stage`.

    Attributes
    ----------
    dout : array
    """

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        problem, (q, k, v, out) = self.problem, self.operands[:4]
        self.dout = normal(self.xp, out.shape, out.dtype, seed=3)
        seed = None if problem.of(Dropout) is None else self.inputs.seed
        options = {**problem.asked, **self.inputs.arrays, "scale": problem.scale, "seed": seed}
        given, lse = attention(q, k, v, return_lse=True, **options)
        self.results = tuple(self.xp.empty(x.shape, x.dtype) for x in (q, k, v))
        self.repeated = self.results[1:]  # blocks add to dq in any order
        self._backward = partial(
            backward.attention_backward,
            problem._replace(returns_lse=True),
            self.operands,
            Results(self.dout, given, lse),
            Gradients(*self.results),
            Extras(tuple(map(self.inputs.arrays.get, ARRAYS)), seed=seed),
            deterministic=False,
        )

    def judge(self) -> Callable[..., Verdict]:
        """Return what judges gradients."""
        return GradientOracle(self.xp, self.problem, self.dout, self.inputs).judge

    def ready(self, variant: Variant, cubin: bytes) -> Call:
        """Return a call of the gradients by a variant, compiled in this process."""
        return partial(self._backward, forced=variant)
