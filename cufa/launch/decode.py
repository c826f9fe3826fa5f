"""The parameter that a launch of `decode` passes to the kernel by value."""

from __future__ import annotations

import numpy as np

from cufa.decode_problem import DecodeProblem
from cufa.dtypes import DTYPES
from cufa.launch import params
from cufa.launch.params import (
    INT,
    LOG2_E,
    TENSOR,
    FourInts,
    Ints,
    ScoreLayout,
    numbers_of,
    packed,
    scale_log2,
)
from cufa.planner.decode import DecodePlan
from cufa.variant import Variant

_DIVISOR = [("multiplier", "u4"), ("shift", "i4"), ("divisor", "i4")]
PARAMS = np.dtype(
    [
        *((name, TENSOR) for name in "qkvo"),
        *((name, "u8") for name in ("lse", "partial", "lengths")),
        *((name, "f4") for name in ("scale_log2", "unified_max")),
        *((name, "i4") for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv")),
        *((name, "i4") for name in ("head_dim", "head_dim_v", "splits", "slack", "spread", "ends")),
        *((name, _DIVISOR) for name in ("group", "row_tiles", "units", "blocks", "parts")),
    ],
    align=True,
)
"""The layout of ``DecodeParams`` in ``kernels/decode_params.cuh``."""

PAGED = np.dtype(
    [("block_table", "u8"), ("table_stride", "i4"), ("pages", "i4"), ("page_size", _DIVISOR)],
    align=True,
)
"""The layout of ``Paged`` in ``kernels/paged.cuh``."""


def dtype_of(variant: Variant) -> np.dtype:
    """Return the layout of a variant's parameter: ``DecodeArguments`` of ``decode_params.cuh``."""
    return params.dtype_of(variant, PARAMS, None if variant.kv == "Contiguous" else PAGED)


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
        dtype = dtype_of(variant)
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
            plan.slack,
            plan.spread,
            plan.ends,
            *divisor(problem.group),
            *divisor(plan.row_tiles),
            *divisor(problem.heads_kv * plan.row_tiles),
            *divisor(plan.grid),
            *divisor(plan.parts),
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
