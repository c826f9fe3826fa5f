"""The parameter that a launch of `decode` passes to the kernel by value."""

from __future__ import annotations

import functools

from cufa.dtypes import DTYPES
from cufa.features.parts import ARRAYS
from cufa.launch.params import (
    LOG2_E,
    FourInts,
    Ints,
    ScoreLayout,
    packed,
    scale_log2,
)
from cufa.launch.signature import TENSORS, Place
from cufa.planner.decode import DecodePlan
from cufa.problem.extras import Extras
from cufa.problem.problem import Problem
from cufa.specs.layout import numbers_of
from cufa.specs.variant import Variant


class DecodeLayout:
    """Where what differs from call to call is in the parameter of a variant.

    Parameters
    ----------
    variant : Variant

    Attributes
    ----------
    partial : int
        The word of the address of the numbers that blocks share.
    """

    def __init__(self, variant: Variant) -> None:
        dtype = variant.parameter
        self._nbytes = dtype.itemsize
        numbers = {name: (offset, kind) for name, offset, kind in numbers_of(dtype)}
        words = {name.removeprefix("params."): at // 8 for name, (at, _) in numbers.items()}
        tensors = (*map("{}.data".format, "qkvo"), "lse")
        self._tensors = tuple((words[name], i) for i, name in enumerate(tensors))
        self.partial, self._lengths = words["partial"], words["lengths"]
        self._table = words.get("kv.block_table")
        self._score = ScoreLayout(variant, dtype)
        self._itemsize = DTYPES[variant.dtype].bytes
        self._numbers = packed(numbers.values())

    def places(self, extras: Extras) -> tuple[Place, ...]:
        """Return where addresses go; that of lengths is 0 where all sequences are full."""
        found = [*self._tensors]
        if extras.lengths:
            first = TENSORS + extras.place(len(ARRAYS))
            found.append((self._lengths, first))
            if self._table is not None:
                found.append((self._table, first + 1))
        found += ((word, TENSORS + extras.place(which)) for word, which in self._score.places)
        return tuple(found)

    def filled(
        self,
        plan: DecodePlan,
        problem: Problem,
        strides: FourInts,
        numbers: tuple[Ints, ...],
        table_stride: int,
    ) -> bytearray:
        """Return the parameter with all numbers; addresses are 0.

        Parameters
        ----------
        plan : DecodePlan
        problem : Problem
        strides : tuple of tuple of int
            Of q, the caches and the result, (batch, heads, seq, head_dim), in bytes.
        numbers : tuple of tuple of int
            Of the arrays that parts of the score read, as `cufa.problem.extras.placed` returns it.
        table_stride : int
            From one row of the block table to the next, in bytes.
        """
        size = self._itemsize
        tensors = [x // size for b, h, s, _ in strides for x in (0, b, h, s)]
        of_table: Ints = ()
        if self._table is not None:
            of_table = (0, table_stride // 4, problem.pages, *divisor(max(1, problem.page_size)))
        parameter = bytearray(self._nbytes)
        self._numbers.pack_into(
            parameter,
            0,
            *tensors,
            *(0, 0, 0),
            scale_log2(problem.scale),
            (problem.unified_max or 0.0) * LOG2_E,
            problem.batch,
            problem.heads_q,
            problem.heads_kv,
            problem.seq_q,
            problem.seq_kv,
            problem.head_dim,
            problem.head_dim_v,
            plan.ends,
            plan.spread,
            *divisor(problem.group),
            *divisor(plan.row_tiles),
            *divisor(problem.heads_kv * plan.row_tiles),
            *divisor(plan.splits_of(problem)),
            *self._score.values(problem, numbers),
            *of_table,
        )
        return parameter


@functools.lru_cache(maxsize=1024)
def divisor(n: int) -> tuple[int, int, int]:
    """Return what ``Divisor`` of ``kernels/divisor.cuh`` holds of a number below 2^31."""
    if n == 1:
        return 0, 0, 1
    shift = (n - 1).bit_length() - 1
    return -(-(1 << (32 + shift)) // n), shift, n
