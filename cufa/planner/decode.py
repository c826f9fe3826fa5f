"""Problem + Device -> DecodePlan: how `decode` runs."""

from __future__ import annotations

from typing import NamedTuple

from cufa.checks import MAX_WINDOW
from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.planner.decode_units import (
    SOME_UNITS,
    SYSTEM_SMEM,
    can_be_whole,
    in_waves,
    keys_of,
    never_cut,
    partial_floats,
    resident,
    shared_end_bytes,
    units_of,
)
from cufa.planner.decode_variants import small_blocks, variant_of
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

MAX_TILES = 2**31 - 2**16
"""Tiles of keys of all sequences together, and what counts as such: they have 32-bit numbers."""

_MAX_ROWS = 2**31 - 2**8
"""Rows that share a K/V head, and heads of all sequences: 32-bit numbers, rounded up to tiles."""

_SMEM_UNIT = 128  # bytes, in which shared memory comes
_SHORT_SPLIT = 1024  # keys: of 560, 15 splits of 8192 keys were faster than 16, of 2192 slower
_ROW_SPLIT = 64  # keys for each row that a split has: 128 splits of 32 rows took longer than 64
_SOME_SPLITS = 12  # one less is not much more for the others
_MANY_SPLITS = 32  # of 1, 2 and 4 units of 8192 keys, more were slower, as they have to be merged


class DecodePlan(NamedTuple):
    """How one call of `decode` runs.

    Attributes
    ----------
    variant : Variant
    grid, block : int
        Blocks, and threads of a block.
    smem_bytes : int
        Of a block.
    row_tiles : int
        Tiles of the rows that share a K/V head.
    splits : int
        Equal splits of every unit, 1 also where units are never cut; 0 where there are as many as
        blocks suffice for, or equal ranges of all keys, if lengths differ much.
    rows : int
        Rows of a tile that are used, at most.
    ends : int
        As how many tiles the end of a unit counts in equal ranges of all keys.
    spread : int
        How many eighths of an equal range, and `ends` more, the longest unit's equal splits may
        have, else blocks have such ranges: more than 8 where whole units follow each other on a
        multiprocessor; 0 with `splits`.
    reason : str
        Why it is not a kernel of attention's own, for a call of `attention`.
    expected_us : tuple of (Variant, float)
        As of `cufa.planner.plan.Plan`.
    """

    variant: Variant
    grid: int
    block: int
    smem_bytes: int
    row_tiles: int
    splits: int
    rows: int
    ends: int
    spread: int
    reason: str = ""
    expected_us: tuple[tuple[Variant, float], ...] = ()

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.variant} grid={self.grid} block={self.block} smem={self.smem_bytes} "
            f"row_tiles={self.row_tiles} splits={self.splits} ({self.reason})"
        )

    @property
    def workspace_floats(self) -> int:
        """0: the memory that blocks share is not the caller's."""
        return 0

    @property
    def partial_floats(self) -> int:
        """float32 numbers that splits of units need: two slots a block, if there are any.

        ``kernels/decode_merge.cuh`` says where they are.
        """
        if self.splits == 1:
            return 0
        return partial_floats(self.grid, self.rows, self.variant.head_dim_v)

    def splits_of(self, problem: Problem) -> int:
        """Return the splits of every unit of a problem, where these are equal."""
        units = problem.batch * problem.heads_kv * self.row_tiles
        return max(1, self.grid // units)


def plan(
    problem: Problem,
    device: Device,
    num_splits: int | None = None,
    kernel: str | Variant | None = None,
) -> DecodePlan:
    """Choose how a problem runs on a device.

    Without `num_splits` there are as many blocks as run at once, but no more than there are tiles
    of keys, or a block for each unit: a sequence, K/V head and tile of rows. How they divide the
    keys is found where lengths are known, on the device, unless no unit is ever cut.

    Parameters
    ----------
    problem : Problem
        Not empty.
    device : Device
    num_splits : int, optional
        Equal splits of every unit.
    kernel : str or Variant, optional
        Forces a kernel, or one instantiation of it.

    Raises
    ------
    TypeError
        `kernel` is neither.
    ValueError
        `kernel` is unknown or cannot run this problem on this device, or the problem is too large.
    """
    if device.compute_capability < 80:
        raise ValueError(
            f"device: {device.name} has compute capability {device.compute_capability / 10}, "
            "8.0 is needed"
        )
    rows, heads = problem.group * problem.seq_q, problem.batch * problem.heads_q
    if max(rows, heads) > _MAX_ROWS:
        raise ValueError(
            f"q: {rows} rows that share a K/V head, or {heads} heads of all sequences, are more "
            f"than {_MAX_ROWS}"
        )
    longest = max(problem.capacity, problem.seq_q)
    if longest > MAX_WINDOW and not problem.left is problem.right is None:
        raise ValueError(
            f"window: {longest} keys a sequence, or queries, are more than {MAX_WINDOW}"
        )
    small = small_blocks(problem, device) if num_splits is None else None
    variant = variant_of(problem, device, num_splits, kernel, small)
    row_tiles = -(-rows // variant.bm)
    units = units_of(problem, variant.bm)
    tiles, used = _tiles(problem, variant), min(rows, variant.bm)
    if variant.whole and min(num_splits or 1, tiles) > 1:
        raise ValueError(f"num_splits: {variant!r} cuts nothing, {num_splits} splits are asked for")
    if num_splits is None:
        never = variant.whole or never_cut(problem, device, variant.bm)
        # One that is named may have another score.
        whole = small is not None and variant == small._replace(score=variant.score)
        whole = never or (whole and can_be_whole(problem, device, variant.bm))
        grid = units if whole else _blocks(problem, device, variant, units)
        splits = int(never)
        smem_bytes = max(variant.smem_bytes, _kept_apart(grid, variant, device))
    else:
        splits = min(num_splits, tiles)  # others would have no key in any sequence
        grid, smem_bytes = units * splits, variant.smem_bytes
    ends = 0 if splits else shared_end_bytes(problem, variant.bm, used) // _tile_bytes(variant)
    if units * (tiles + ends) > MAX_TILES:
        raise ValueError(
            f"k_cache: {units} x {tiles} tiles of keys, of all sequences and heads, and {ends} for "
            f"the end of each are more than {MAX_TILES}"
        )
    if not isinstance(kernel, Variant):
        variant = variant._replace(whole=splits == 1)
    spread = 0 if splits else _spread(units / device.sm_count, grid < 2 * units)
    return DecodePlan(
        *(variant, grid, variant.threads, smem_bytes, row_tiles, splits, used, ends, spread)
    )


def _kept_apart(grid: int, variant: Variant, device: Device) -> int:
    """Return the bytes of shared memory with which each multiprocessor has as many blocks.

    Where all run at once, they begin while those of the kernel in front end, so that some would
    have more otherwise, and others less: 32 sequences of 4096 keys with 8 heads of 64 columns, a
    block each, took 1.34 times as long.
    """
    each = -(-grid // device.sm_count)
    if each > resident(variant, device):
        return 0
    least = device.smem_per_sm // (each + 1) - SYSTEM_SMEM  # and a bit more
    return min(_SMEM_UNIT * (least // _SMEM_UNIT + 1), device.smem_per_block)


def _tile_bytes(variant: Variant) -> int:
    """Return the bytes of K and V in a tile of keys."""
    columns = variant.head_dim + variant.head_dim_v
    return variant.bn * columns * DTYPES[variant.dtype].bytes


def _blocks(problem: Problem, device: Device, variant: Variant, units: int) -> int:
    """Return how many blocks divide all keys."""
    at_once = device.sm_count * resident(variant, device)
    tiles = _tiles(problem._replace(seq_kv=keys_of(problem)), variant)
    if in_waves(units, at_once) and can_be_whole(problem, device, variant.bm):
        return units
    grid = min(at_once, units * tiles)
    splits = grid // units
    # To merge many splits takes longer than to read long ones.
    long_splits = tiles * variant.bn // (_ROW_SPLIT * variant.bm)
    if splits > max(_MANY_SPLITS, long_splits):
        return units * max(_MANY_SPLITS, long_splits)
    # The blocks that merge end last, and blocks of the next launch on their multiprocessors would
    # begin late: there is no work for those, if it is no part of much.
    if splits >= _SOME_SPLITS and tiles * variant.bn <= _SHORT_SPLIT * splits:
        return units * (splits - 1)
    return grid


def _spread(of_each: float, is_whole: bool) -> int:
    """Return how long splits may be, in eighths of an equal range of all keys.

    There are so many units for each multiprocessor. Blocks of whole units that follow each other
    end together but for the last: none should take more than three quarters of the time of all.
    """
    return int(6 * of_each) if is_whole and of_each > SOME_UNITS else 8


def _tiles(problem: Problem, variant: Variant) -> int:
    """Return the most tiles of keys that a sequence's queries visit: at least one.

    Those of a window may begin and end anywhere.
    """
    tiles = -(-problem.capacity // variant.bn)
    return max(1, min(tiles, -(-(problem.visited - 1) // variant.bn) + 1))
