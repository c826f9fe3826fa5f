"""Problem + Device -> DecodePlan: how `decode` runs."""

from __future__ import annotations

from typing import NamedTuple

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.planner.checks import check_decoding, check_tiles
from cufa.planner.decode_model import Items
from cufa.planner.decode_variants import tile_rows, variant_of
from cufa.planner.residency import kept_apart, resident
from cufa.problem.problem import Problem
from cufa.specs import default_decoder
from cufa.specs.decode_block import partial_floats
from cufa.specs.variant import Variant

_MANY_PARTS, _SHORT_PART = 12, 1024
"""From this many parts of this few keys on, one is left out: multiprocessors are free to merge."""


class DecodePlan(NamedTuple):
    """How one call of `decode` runs.

    Attributes
    ----------
    variant, grid, block, smem_bytes, reason, expected_us
        As in `cufa.planner.plan.Plan`.
    row_tiles, rows : int
        Tiles of the rows that share a K/V head, and rows of one that are used, at most.
    splits : int
        Parts of every sequence, 1 also where items are never cut; 0 where lengths decide.
    parts : int
        The same; where lengths decide, into how many parts each can be cut if these differ little.
    slack, spread : int
        An equal part may have `slack` tiles of keys more than `spread` / 8 of an equal share.
    ends : int
        Tiles that the end of an item counts for, where keys are shared out equally.
    """

    variant: Variant
    grid: int
    block: int
    smem_bytes: int
    row_tiles: int
    splits: int
    parts: int
    rows: int
    slack: int
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
        """float32 numbers that pieces of sequences need, see ``kernels/decode_merge.cuh``."""
        floats = partial_floats(self.grid, self.rows, self.variant.head_dim_v)
        return floats if self.splits != 1 else 0


def plan_splits(
    problem: Problem,
    device: Device,
    num_splits: int | None = None,
    kernel: str | Variant | None = None,
) -> DecodePlan:
    """Choose how a problem, which is not empty, runs on a device.

    Each work item has a block, or as many blocks as run at once share all keys out: whatever costs
    less if all sequences are as long as they can be. The device cuts items by the lengths.

    Parameters
    ----------
    problem, device
    num_splits : int, optional
        Parts of every sequence; then nothing that changes bits depends on the batch.
    kernel : str or Variant, optional
        Forces a kernel, or one instantiation of it; errors are those of `check_decoding`.
    """
    check_decoding(problem, device, kernel)
    rows = problem.group * problem.seq_q
    if kernel is None:
        has_max = problem.unified_max is not None
        kernel = default_decoder(rows, problem.dtype, has_max, device, problem.kv_dtype).name
    bm = kernel.bm if isinstance(kernel, Variant) else tile_rows(problem, kernel)
    items = Items.of(problem, device, bm)
    never = num_splits is None and items.are_whole(DTYPES[problem.dtype].bytes)
    if isinstance(kernel, Variant):
        variant, never = kernel, never or kernel.whole
    else:
        variant = variant_of(problem, device, kernel, items, num_splits is not None, never)
    # The keys of a window may begin and end anywhere in a tile.
    bn = variant.bn
    tiles = max(1, min(-(-problem.seq_kv // bn), -(-(problem.visited - 1) // bn) + 1))
    grid, parts, splits, smem_bytes = items.number, 1, int(never), variant.smem_bytes
    if num_splits is not None:
        splits = parts = min(num_splits, tiles)  # others would have no key in any sequence
        grid *= parts
        if variant.whole and parts > 1:
            raise ValueError(f"num_splits: {variant!r} cuts nothing, {parts} parts are asked for")
    else:
        blocks = resident(variant, device)
        if not never and not (items.of_each > 1 and items.is_apart(blocks)):
            grid = min(device.sm_count * blocks, items.number * -(-items.keys // bn))
            parts = items.parts(grid)
            if parts < grid // items.number:
                grid = items.number * parts
            elif parts >= _MANY_PARTS and items.keys <= _SHORT_PART * parts:
                parts -= 1
        smem_bytes = max(smem_bytes, kept_apart(grid, variant, device))
    tile_bytes = bn * (items.size // items.keys)
    ends = 0 if splits else items.next // tile_bytes
    check_tiles(items.number, tiles, ends)
    if not isinstance(kernel, Variant):
        variant = variant._replace(whole=splits == 1)
    return DecodePlan(
        *(variant, grid, variant.threads, smem_bytes, -(-rows // bm), splits, parts, min(rows, bm)),
        slack=items.slack(parts, problem.batch) // tile_bytes,
        ends=ends,
        # An item may be as long as all but one that its place reads: others fill the time.
        spread=int(8 * max(1.0, items.of_each - 1)) if parts == 1 else 8,
    )
