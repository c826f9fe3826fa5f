"""The parameter that a launch of `decode` passes to the kernel by value."""

from __future__ import annotations

from cufa.decode_problem import DecodeProblem
from cufa.dtypes import DTYPES
from cufa.launch.params import (
    INT,
    LOG2_E,
    FourInts,
    Ints,
    ScoreLayout,
    packed,
    scale_log2,
)
from cufa.planner.decode import DecodePlan
from cufa.specs.layout import numbers_of
from cufa.variant import Variant


class DecodeLayout:
    """Where what differs from call to call is in the parameter of a variant.

    Parameters
    ----------
    variant : Variant

    Attributes
    ----------
    nbytes : int
    places : tuple of int
        Of the addresses of Q, K, V, O, the LSE, the numbers that blocks share, the lengths, the
        block table, if there is one, and the `arrays`; in 64-bit words.
    paged : bool
        Whether there is a block table.
    arrays : tuple of int
        Which of `cufa.score.ARRAYS` parts of the score read.
    """

    def __init__(self, variant: Variant) -> None:
        self.paged = variant.kv != "Contiguous"
        dtype = variant.parameter
        self.nbytes = dtype.itemsize
        numbers = {
            name.removeprefix("params."): (offset, kind) for name, offset, kind in numbers_of(dtype)
        }
        names = [*map("{}.data".format, "qkvo"), "lse", "partial", "lengths"]
        names += ["kv.block_table"] * self.paged
        self._score = ScoreLayout(variant, dtype)
        of_arrays = (place for place, _ in self._score.places)
        self.places = (*(numbers[name][0] // 8 for name in names), *of_arrays)
        self.arrays = tuple(which for _, which in self._score.places)
        self._seq_kv = numbers["seq_kv"][0]
        self._itemsize = DTYPES[variant.dtype].bytes
        self._numbers = packed(numbers.values())

    def fill(
        self,
        into: memoryview,
        plan: DecodePlan,
        problem: DecodeProblem,
        strides: FourInts,
        table_stride: int,
        beside: tuple[Ints, ...],
    ) -> None:
        """Write all numbers but the addresses, which become 0.

        Parameters
        ----------
        into : memoryview
            Bytes.
        plan : DecodePlan
        problem : DecodeProblem
        strides : tuple of tuple of int
            Of q, the caches and the result, (batch, heads, seq, head_dim), in bytes.
        table_stride : int
            From one row of the block table to the next, in bytes.
        beside : tuple of tuple of int
            Strides of the arrays that parts of the score read, in elements.
        """
        size = self._itemsize
        tensors = (x for batch, head, seq, _ in strides for x in (0, batch, head, seq))
        of_table = (0, table_stride // 4, problem.pages, *divisor(max(1, problem.page_size)))
        self._numbers.pack_into(
            into,
            0,
            *(stride // size for stride in tensors),
            *(0, 0, 0),
            scale_log2(problem.scale),
            (problem.unified_max or 0.0) * LOG2_E,
            problem.batch,
            problem.heads_q,
            problem.heads_kv,
            problem.seq_q,
            problem.capacity,
            problem.head_dim,
            problem.head_dim_v,
            plan.splits,
            plan.ends,
            *divisor(problem.group),
            *divisor(plan.row_tiles),
            *divisor(problem.heads_kv * plan.row_tiles),
            *self._score.values(problem.of_one(problem.capacity), beside),
            *(of_table if self.paged else ()),
        )

    def set_keys(self, into: memoryview, capacity: int) -> None:
        """Write another number of keys where `fill` has written one."""
        INT.pack_into(into, self._seq_kv, capacity)


def divisor(n: int) -> tuple[int, int, int]:
    """Return what ``Divisor`` of ``kernels/divisor.cuh`` holds of a number below 2^31."""
    if n == 1:
        return 0, 0, 1
    shift = (n - 1).bit_length() - 1
    return -(-(1 << (32 + shift)) // n), shift, n
