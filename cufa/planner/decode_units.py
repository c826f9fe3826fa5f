"""Units of a problem of `decode`: what reading one takes, and whether it should be cut.

A unit is a sequence, a K/V head and a tile of rows.
"""

from __future__ import annotations

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.planner.rules import KEY_STEP
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

SYSTEM_SMEM = 1024  # bytes of a block
MOST_SMALL = 4  # blocks of a multiprocessor that all begin at once
NEARLY_NONE = 0.1  # of a wave that is idle
NEARLY_ALL = 0.95  # multiprocessors: of so many units, few are long enough to be cut
SOME_UNITS = 2  # a multiprocessor: 1.94 of unequal lengths were 2% slower uncut, 2.9 10% faster
_MANY_WAVES = 3  # of 1.5 and 2.3 waves a block each was slower than equal ranges, not of 3.0
_MOST_PARTIAL = 32 << 20  # bytes, which a stream keeps, see cufa/launch/scratch.py

_SECOND_END, _SECOND_ROW = 60 << 10, 12 << 10
"""Bytes that a multiprocessor of an H200 reads in the time that the end of a second unit takes it,
and each row of that: 2.8 us for 2 rows of 256 columns, 3.3 for 4 of 128, 7 for 16."""

_WIDE_END, _WIDE_ELEMENT = 96 << 10, 36
"""The same of more than 16 rows, and of each of their columns: a tile has fewer teams to add up."""

_LOOK_UP = 84 << 10
"""The same where a block finds the pages of its unit: blocks of two warps were faster than others
for units of 384 KB in pages, and of 192 KB in one piece, of 4 rows."""

_NEVER_CUT = 3 << 19
"""Bytes of units of which many are whole, however lengths differ: a block that need not look at all
lengths begins sooner. 256 KB took 0.99 of the time, and 0.36 where one was long and all others had
16 keys; 1 MB 0.999 and 0.73, 25 us. Of float32, half: products take longer."""

_NEVER_CUT_FEW = 512 << 10
"""The same of more than one unit a multiprocessor: of 64 shapes, equal and unequal, 0.79 of the
time in geometric mean, 1.42 at most, where one was as long as this and all others had 16 keys."""

_NEVER_CUT_ALONE = 128 << 10
"""The same however few units there are: to merge splits takes longer than to read these. 0.85 of
the time for 192 and 256 keys of 8 heads of 128 columns, 1.23 for 512."""

_NEVER_CUT_OF_MANY_HEADS, _MANY_HEADS = 4 << 20, 0.2
"""The same where there are K/V heads for so many of the multiprocessors, as 32 of 132 read at half
speed: one sequence longer than all others is not much slower whole. 46 timings of 32 and 64 heads,
equal and unequal, 0.96 of the time in geometric mean, 1.19 at most."""


def padded(head_dim: int) -> int:
    """Return the head dim that is compiled."""
    return next(n for n in (32, 64, 96, 128, 192, 256) if head_dim <= n)


def units_of(problem: Problem, bm: int) -> int:
    """Return how many sequences, K/V heads and tiles of rows there are."""
    return problem.batch * problem.heads_kv * -(-problem.group * problem.seq_q // bm)


def keys_of(problem: Problem) -> int:
    """Return the most keys that a sequence can have, of which nothing changes within a step.

    Those in front of a window do not count.
    """
    return -(-problem.visited // KEY_STEP) * KEY_STEP


def unit_bytes(problem: Problem) -> int:
    """Return the bytes of K and V of a sequence and head."""
    columns = problem.head_dim + problem.head_dim_v
    return keys_of(problem) * columns * DTYPES[problem.dtype].bytes


def second_end_bytes(rows: int) -> int:
    """Return what a multiprocessor reads while a second unit of so many rows ends."""
    return _SECOND_END + rows * _SECOND_ROW


def end_bytes(problem: Problem) -> int:
    """Return what a multiprocessor reads while a unit ends, and finds its pages."""
    rows = min(problem.group * problem.seq_q, 16)
    return second_end_bytes(rows) + (_LOOK_UP if problem.is_paged else 0)


def _next_end_bytes(problem: Problem, bm: int, rows: int) -> int:
    """Return what a multiprocessor reads while a second unit ends, in tiles of `bm` rows."""
    wide = _WIDE_END + _WIDE_ELEMENT * rows * problem.head_dim_v
    return wide if bm > 16 else second_end_bytes(rows)


def shared_end_bytes(problem: Problem, bm: int, rows: int) -> int:
    """Return as how many bytes of keys a unit's end counts in equal ranges of all keys.

    Of 35 timings of unequal lengths with few rows on an H200, `second_end_bytes` and half of it
    took 1.02 and 1.08 of the time of three halves; with many rows, an eighth of what was taken for
    their end took 1.06 of half.
    """
    size = _next_end_bytes(problem, bm, rows)
    return size if bm > 16 else size * 5 // 4 + (_LOOK_UP if problem.is_paged else 0)


def in_waves(units: int, at_once: int) -> bool:
    """Whether a block each, beginning as others end, keep all multiprocessors busy to the end."""
    waves = units / at_once
    return waves >= _MANY_WAVES or (waves > 1 and -waves % 1 <= NEARLY_NONE)


def partial_floats(blocks: int, rows: int, columns: int) -> int:
    """Return the float32 numbers that the splits of so many blocks take, two slots each."""
    return 2 * blocks * rows * (columns + 4 * -(-columns // 64))


def _has_memory(problem: Problem, bm: int) -> bool:
    """Whether a block for each unit can leave splits, as it must where lengths differ much."""
    rows, columns = min(problem.group * problem.seq_q, bm), padded(problem.head_dim_v)
    return 4 * partial_floats(units_of(problem, bm), rows, columns) <= _MOST_PARTIAL


def never_cut(problem: Problem, device: Device, bm: int) -> bool:
    """Whether units are so short, or so many, that a block each is best however lengths differ."""
    least = MOST_SMALL if _has_memory(problem, bm) else SOME_UNITS
    size = unit_bytes(problem) * DTYPES[problem.dtype].bytes // 2
    units = units_of(problem, bm)
    of_each, heads = units / device.sm_count, problem.heads_kv / device.sm_count
    most = _NEVER_CUT if of_each > least else _NEVER_CUT_FEW if of_each > 1 else _NEVER_CUT_ALONE
    if bm == 16 and heads >= _MANY_HEADS and in_waves(units, device.sm_count):
        most = max(most, _NEVER_CUT_OF_MANY_HEADS)
    return size <= most


def can_be_whole(problem: Problem, device: Device, bm: int) -> bool:
    """Whether each unit can have a block."""
    return _has_memory(problem, bm) or never_cut(problem, device, bm)


def resident(variant: Variant, device: Device) -> int:
    """Return how many blocks of a variant a multiprocessor is planned to hold."""
    fit = device.smem_per_sm // (variant.smem_bytes + SYSTEM_SMEM)
    return max(1, min(variant.blocks_per_sm, fit))
