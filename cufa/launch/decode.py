"""The parameter that a launch of `decode` passes to the kernel by value."""

from __future__ import annotations

import functools

from cufa.features.parts import ARRAYS
from cufa.launch.params import (
    LOG2_E,
    FourInts,
    Ints,
    ParameterLayout,
    scale_log2,
)
from cufa.launch.signature import TENSORS, Place
from cufa.planner.decode import DecodePlan
from cufa.problem.extras import Extras
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant


class DecodeLayout(ParameterLayout):
    """That of the kernels that decode.

    Parameters
    ----------
    variant : Variant
    """

    def __init__(self, variant: Variant) -> None:
        tensors = [(f"params.{name}.data", i) for i, name in enumerate("qkvo")]
        super().__init__(variant, [*tensors, ("params.lse", 4)], "params.partial")
        self._table = self._words.get("kv.block_table")

    def places(self, extras: Extras) -> tuple[Place, ...]:
        """As of `ParameterLayout`; the address of lengths is 0 where all sequences are full."""
        found = super().places(extras)
        if not extras.lengths:
            return found
        first = TENSORS + extras.place(len(ARRAYS))
        of_lengths = self._words["params.lengths"], first
        of_table = () if self._table is None else ((self._table, first + 1),)
        return *found, of_lengths, *of_table

    def filled(
        self,
        plan: DecodePlan,
        problem: Problem,
        strides: FourInts,
        numbers: tuple[Ints, ...] = (),
        table_stride: int = 0,
    ) -> bytes:
        """As of `ParameterLayout`."""
        heads_kv = problem.heads_kv
        of_table: Ints = ()
        if self._table is not None:
            of_table = (0, table_stride // 4, problem.pages, *divisor(max(1, problem.page_size)))
        return self._numbers.pack(
            *self._of_tensors(strides),
            0,
            0,
            0,
            scale_log2(problem.scale),
            (problem.unified_max or 0.0) * LOG2_E,
            problem.batch,
            problem.heads_q,
            heads_kv,
            problem.seq_q,
            problem.seq_kv,
            problem.head_dim,
            problem.head_dim_v,
            plan.splits,
            plan.slack,
            plan.spread,
            plan.ends,
            *_divisors(problem.group, plan.row_tiles, heads_kv, plan.grid, plan.parts),
            *self._score.values(problem, numbers),
            *of_table,
        )


@functools.lru_cache(maxsize=1024)
def _divisors(group: int, row_tiles: int, heads_kv: int, blocks: int, parts: int) -> Ints:
    """Return the numbers by which the kernels divide, in the order of their parameter."""
    found = group, row_tiles, heads_kv * row_tiles, blocks, parts
    return tuple(number for each in found for number in divisor(each))


@functools.lru_cache(maxsize=1024)
def divisor(n: int) -> tuple[int, int, int]:
    """Return what ``Divisor`` of ``kernels/divisor.cuh`` holds of a number below 2^31."""
    if n == 1:
        return 0, 0, 1
    shift = (n - 1).bit_length() - 1
    return -(-(1 << (32 + shift)) // n), shift, n
