"""The parameter that a launch of `decode` passes to the kernel by value."""

from __future__ import annotations

import functools

from cufa.features.parts import ARRAYS
from cufa.launch.params import LOG2_E, Ints, ParameterLayout, PlanNumbers, scale_log2
from cufa.launch.signature import TENSORS, AddressSlot
from cufa.planner.decode import DecodePlan
from cufa.problem.extras import Extras
from cufa.problem.problem import Problem
from cufa.problem.scales import SCALES
from cufa.specs.variant import Variant


class DecodeLayout(ParameterLayout):
    """The layout of the parameter of kernels that decode.

    Parameters
    ----------
    variant : Variant
    """

    def __init__(self, variant: Variant) -> None:
        tensors = [(f"params.{name}.data", i) for i, name in enumerate("qkvo")]
        super().__init__(variant, [*tensors, ("params.lse", 4)], "params.partial")
        self._table = self.words.get("kv.block_table")
        scales = (self.words.get(f"params.{name}.data") for name in SCALES)
        self._scales = tuple(word for word in scales if word is not None)

    def places(self, extras: Extras) -> tuple[AddressSlot, ...]:
        """As in `ParameterLayout`; the address of lengths is 0 where all sequences are full."""
        places = super().places(extras)
        if not extras.lengths:
            return places
        first = TENSORS + extras.place(len(ARRAYS))
        of_lengths = self.words["params.lengths"], first
        of_table = () if self._table is None else ((self._table, first + 1),)
        behind = first + len(extras.lengths) + len(extras.mods)
        of_scales = ((word, behind + i) for i, word in enumerate(self._scales))
        return *places, of_lengths, *of_table, *of_scales

    def of_plan(self, plan: DecodePlan, problem: Problem) -> PlanNumbers:
        """As in `ParameterLayout`."""
        heads_kv, row_tiles = problem.heads_kv, plan.row_tiles
        divisors = problem.group, row_tiles, heads_kv * row_tiles, plan.grid, plan.parts
        lse = partial = lengths = 0  # addresses
        return PlanNumbers(
            (
                *(lse, partial, lengths),
                scale_log2(problem.scale),
                (problem.unified_max or 0.0) * LOG2_E,
                problem.batch,
                problem.heads_q,
                heads_kv,
            ),
            (
                problem.head_dim,
                problem.head_dim_v,
                plan.splits,
                plan.slack,
                plan.spread,
                plan.ends,
                *(number for each in divisors for number in divisor(each)),
            ),
        )

    def _of_scales(self, extras: Extras) -> Ints:
        numbers: Ints = ()
        for scales in extras.scales:
            address = 0
            numbers = *numbers, address, *(step // scales.dtype.itemsize for step in scales.strides)
        return numbers

    def _of_table(self, problem: Problem, extras: Extras) -> Ints:
        if self._table is None or extras.table is None:
            return ()
        table, stride = 0, extras.table.strides[0]  # an address
        return (table, stride // 4, problem.pages, *divisor(max(1, problem.page_size)))


@functools.lru_cache(maxsize=1024)
def divisor(n: int) -> tuple[int, int, int]:
    """Return what ``Divisor`` of ``kernels/divisor.cuh`` holds of a number below 2^31."""
    if n == 1:
        return 0, 0, 1
    shift = (n - 1).bit_length() - 1
    return -(-(1 << (32 + shift)) // n), shift, n
