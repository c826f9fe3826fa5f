"""DecodeProblem + Device -> DecodePlan: how `decode` runs."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cufa.decode_problem import DecodeProblem
from cufa.device import Device
from cufa.kernel import ELEMENT_BYTES, KERNELS
from cufa.planner.rules import KEY_STEP
from cufa.score import MAX_WINDOW
from cufa.variant import Variant

MAX_TILES = 2**31 - 2**16
"""Tiles of keys of all sequences together: they have 32-bit numbers."""

_MAX_ROWS = 2**31 - 2**8
"""Rows that share a K/V head, and heads of all sequences: 32-bit numbers, rounded up to tiles."""

_WIDE = "decode_wgmma"  # the kernel of many rows
_MOST_LOOKED_UP = 32  # keys of a tile, if each can be in another page
_SYSTEM_SMEM, _SMEM_UNIT = 1024, 128  # bytes of a block, and that all come in
_SHORT_UNIT = 2 << 20  # bytes: of 1 MB two blocks were 4% faster on an H200, of 4 and 8 as fast
_MOST_SMALL = 4  # blocks of a multiprocessor that all begin at once
_NEARLY_NONE = 0.1  # of a wave that is idle
_UNEVEN = 1.03  # of the time: 31 x 2048 for which 0.985 is foretold were 1% slower
_SHORT_PART = 64  # tiles: of 35, 15 parts of 8192 keys were faster than 16, of 137 slower
_SOME_PARTS = 12  # one less is not much more for the others
_MANY_PARTS = 32  # of 1, 2 and 4 units of 8192 keys, more were slower, as pieces have to be merged
_NEARLY_ALL = 0.95  # multiprocessors: with 128 of 132, long units were read 1 to 3% faster
_SOME_UNITS = 2  # a multiprocessor: 1.94 of unequal lengths were 2% slower uncut, 2.9 10% faster
_MANY_WAVES = 3  # of 1.5 and 2.3 waves a block each was slower than equal shares, not of 3.0
_SECOND_END, _SECOND_ROW = 60 << 10, 12 << 10
"""Bytes that a multiprocessor of an H200 reads in the time that the end of a second unit takes it,
and each row of that: 2.8 us for 2 rows of 256 columns, 3.3 for 4 of 128, 7 for 16, 26 for 64."""

_LOOK_UP = 84 << 10
"""The same where a block finds the pages of its unit: blocks of two warps were faster than others
for units of 384 KB in pages, and of 192 KB in one piece, of 4 rows."""

_NEVER_CUT = 3 << 19
"""Bytes of units of which many are whole, however lengths differ: a block that need not look at all
lengths begins sooner. 256 KB took 0.99 of the time, and 0.36 where one was long and all others had
16 keys; 1 MB 0.999 and 0.73, 25 us. Of float32, half: products take longer."""

_MOST_PARTIAL = 32 << 20  # bytes, which a stream keeps, see cufa/launch/scratch.py
_Rings = tuple[tuple[int, int, int], ...]
_RINGS = ((16, 2, 8), (16, 2, 4), (16, 2, 2))
"""Keys of a tile, stages and warps: the first that fits is taken. To read at full speed, a
multiprocessor must have asked for some 30 KB at any time; with more than 128 KB it reads slower."""

_MOST_ASKED = 128 << 10  # bytes
_DEEP_RINGS = ((16, 3, 8), *_RINGS)
"""The same where a multiprocessor reads little: then more of it should be on its way at once."""

_LITTLE = 256 << 10
"""Bytes. Of 127 KB with 64 columns, three stages were 2% faster than two, of 0.5 MB and more 0 to
2% slower."""

_TINY_RINGS = ((16, 3, 12), *_DEEP_RINGS)
"""The same of 32 columns."""

_TINY_TILE, _SMALL_TILE, _TILE = 2 << 10, 4 << 10, 8 << 10
"""Bytes of 16 keys and values with 32, 64 and 128 columns."""

_TINY_UNIT = 48 << 10
"""Bytes of a unit with 64 columns of which two warps a block were faster than four, by 1 to 26%;
with 64 KB they were by 2.5% in a case, 4% slower in another."""

_TEAM_RINGS = ((32, 2, 8), (16, 2, 8), (16, 2, 4))
"""The same of 32 or 64 rows, where two warps share a ring."""

_TEAM_RINGS_OF_SIXTEENS = ((16, 3, 8), *_TEAM_RINGS)
"""Of 32 rows, where pages hold sixteens of keys and no tiles of 32: each tile then is of one page.
With rows of 64 columns that was 6% slower."""

_WGMMA_RINGS = ((64, 3, 8), (64, 2, 8), (32, 4, 8), (32, 2, 8))
"""The same of `decode_wgmma`, where four do."""

_SHORT_OF_SIXTEENS = 256 << 10  # bytes
_WHOLE_DIMS = ((64, 64), (128, 128))
"""Head dims for which these were measured: sixteen warps spill registers, if not in the loop."""

_WGMMA_WHOLE_RINGS = ((64, 2, 16), (32, 2, 16), *_WGMMA_RINGS)
"""Where no unit is cut: to add up twice as many teams takes long, and longer with pieces."""


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
        Parts of every sequence, 1 also where many are short; 0 where blocks share out all keys
        evenly, if lengths differ much.
    parts : int
        The same, or into how many each can be cut where lengths differ little.
    rows : int
        Rows of a tile that are used, at most.
    slack : int
        By how many tiles of keys an equal part may exceed `spread` of an equal share of all keys.
    spread : int
        Eighths; more than 8 where whole units follow each other on a multiprocessor.
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
    parts: int
    rows: int
    slack: int
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
    def partial_floats(self) -> int:
        """float32 numbers that pieces of sequences need: two places a block, if there are any.

        ``kernels/decode_merge.cuh`` says where they are.
        """
        if self.splits == 1:
            return 0
        return _partial_floats(self.grid, self.rows, self.variant.head_dim_v)


def plan(
    problem: DecodeProblem,
    device: Device,
    num_splits: int | None = None,
    kernel: str | Variant | None = None,
) -> DecodePlan:
    """Choose how a problem runs on a device.

    Without `num_splits` there are as many blocks as run at once, but no more than there are tiles
    of keys, or a block for each unit: a sequence, K/V head and tile of rows. How they share the
    keys out is found where lengths are known, on the device, unless no unit is ever cut.

    Parameters
    ----------
    problem : DecodeProblem
        Not empty.
    device : Device
    num_splits : int, optional
        Parts of every sequence.
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
    small = _small_blocks(problem, device) if num_splits is None else None
    variant = _chosen(problem, device, num_splits, kernel, small)
    row_tiles = -(-rows // variant.bm)
    units = _units(problem, variant.bm)
    tiles = _tiles(problem, variant)
    if units * tiles > MAX_TILES:
        raise ValueError(
            f"k_cache: {units} x {tiles} tiles of keys, of all sequences and heads, are more than "
            f"{MAX_TILES}"
        )
    if num_splits is None:
        # One that is named may have another score.
        whole = small is not None and variant == small._replace(score=variant.score)
        whole = whole and _can_be_whole(problem, device, variant.bm)
        grid, parts = (units, 1) if whole else _shares(problem, device, variant, units)
        splits = int(grid == units and _never_cut(problem, device, variant.bm))
        smem_bytes = max(variant.smem_bytes, _kept_apart(grid, variant, device))
    else:
        splits = parts = min(num_splits, tiles)  # others would have no key in any sequence
        grid, smem_bytes = units * splits, variant.smem_bytes
    block, used = variant.threads, min(rows, variant.bm)
    slack = (_SECOND_END + used * _SECOND_ROW) // _tile_bytes(variant)
    return DecodePlan(
        *(variant, grid, block, smem_bytes, row_tiles, splits, parts, used, slack),
        spread=_spread(units / device.sm_count, parts),
    )


def _resident(variant: Variant, device: Device) -> int:
    """Return how many blocks of a variant a multiprocessor is planned to hold."""
    fit = device.smem_per_sm // (variant.smem_bytes + _SYSTEM_SMEM)
    return max(1, min(variant.blocks_per_sm, fit))


def _kept_apart(grid: int, variant: Variant, device: Device) -> int:
    """Return the bytes of shared memory with which each multiprocessor has as many blocks.

    Where all run at once, they begin while those of the kernel in front end, so that some would
    have more otherwise, and others less: 32 sequences of 4096 keys with 8 heads of 64 columns, a
    block each, took 1.34 times as long.
    """
    each = -(-grid // device.sm_count)
    if each > _resident(variant, device):
        return 0
    least = device.smem_per_sm // (each + 1) - _SYSTEM_SMEM  # and a bit more
    return min(_SMEM_UNIT * (least // _SMEM_UNIT + 1), device.smem_per_block)


def _tile_bytes(variant: Variant) -> int:
    """Return the bytes of K and V in a tile of keys."""
    columns = variant.head_dim + variant.head_dim_v
    return variant.bn * columns * ELEMENT_BYTES[variant.dtype]


def _shares(
    problem: DecodeProblem, device: Device, variant: Variant, units: int
) -> tuple[int, int]:
    """Return how many blocks share out all keys, and into how many parts each unit can be cut."""
    at_once = device.sm_count * _resident(variant, device)
    tiles = _tiles(problem._replace(capacity=_keys(problem)), variant)
    if _in_waves(units, at_once) and _can_be_whole(problem, device, variant.bm):
        return units, 1
    grid = min(at_once, units * tiles)
    parts = max(1, grid // max(1, units))
    # A few multiprocessors less read as fast, and then nothing is cut but into equal parts.
    if parts < _SOME_PARTS and _NEARLY_ALL * at_once < units * parts < at_once:
        return units * parts, parts
    # To merge many pieces takes longer than to read long ones.
    if parts > max(_MANY_PARTS, tiles // _SHORT_PART):
        parts = max(_MANY_PARTS, tiles // _SHORT_PART)
        return units * parts, parts
    # The blocks that merge end last, and blocks of the next launch on their multiprocessors would
    # begin late: there is no work for those, if it is no part of much.
    if parts >= _SOME_PARTS and tiles <= _SHORT_PART * parts:
        parts -= 1
    return grid, parts


def _spread(of_each: float, parts: int) -> int:
    """Return how long a unit may be that no blocks share, in eighths of an equal share of all keys.

    There are so many for each multiprocessor. Blocks that follow each other end together but for
    the last: no unit should take more than three quarters of the time of all.
    """
    return int(6 * of_each) if parts == 1 and of_each > _SOME_UNITS else 8


def _partial_floats(blocks: int, rows: int, columns: int) -> int:
    return 2 * blocks * rows * (columns + 4 * -(-columns // 64))


def _chosen(
    problem: DecodeProblem,
    device: Device,
    num_splits: int | None,
    kernel: str | Variant | None,
    small: Variant | None,
) -> Variant:
    if kernel is not None and not isinstance(kernel, (str, Variant)):
        raise TypeError(f"kernel must be a str or a Variant, not {type(kernel).__name__}")
    if isinstance(kernel, Variant):
        complaint = kernel.illegal(device)
        dims, most = (problem.head_dim, problem.head_dim_v), (kernel.head_dim, kernel.head_dim_v)
        if complaint is None and not KERNELS[kernel.kernel].decodes:
            complaint = "it is not for decode"
        if complaint is None and kernel.dtype != problem.dtype:
            complaint = f"it is for {kernel.dtype}, q has {problem.dtype}"
        if complaint is None and (most[0] < dims[0] or most[1] < dims[1]):
            complaint = f"its head dims {most} are less than the problem's {dims}"
        # One that is named may cap scores as it does where no log-sum-exp is asked for.
        problems = problem, problem._replace(returns_lse=False)
        if complaint is None and all(kernel != _finding(kernel, each) for each in problems):
            needed = _finding(kernel, problem)
            complaint = f"the call needs the score {needed.score} and {needed.kv}"
        if complaint is not None:
            raise ValueError(f"kernel: {kernel!r}: {complaint}")
        return kernel
    name = kernel or _default(problem, device)
    if name not in KERNELS or not KERNELS[name].decodes:
        names = ", ".join(each.name for each in KERNELS.values() if each.decodes)
        raise ValueError(f"kernel must be one of {names}, not {name!r}")
    if problem.dtype not in KERNELS[name].dtypes:
        takes = " or ".join(KERNELS[name].dtypes)
        raise ValueError(f"kernel: {name} takes {takes}, q has {problem.dtype}")
    head_dims = problem.head_dim, problem.head_dim_v
    if problem.unified_max is not None and "unified" not in KERNELS[name].arguments:
        raise ValueError(f"kernel: {name} has no unified_max")
    bm = 64 if name == _WIDE else _tile_rows(problem)
    if name == _WIDE:
        team, rings = 4, _wide_rings(problem, device, num_splits)
    elif small is not None:
        return small
    elif bm == 16:
        team, rings = 1, _rings(problem, device, num_splits)
    else:
        sixteens = bm == 32 and problem.page_size % 32 == 16 and problem.head_dim_v > 96
        team, rings = 2, _TEAM_RINGS_OF_SIXTEENS if sixteens else _TEAM_RINGS
    tile = name, problem.dtype, head_dims, bm
    return _finding(_variant(tile, team, rings, problem.page_size or 1 << 30, device), problem)


def _default(problem: DecodeProblem, device: Device) -> str:
    """Return the kernel of a call that names none."""
    many = problem.group * problem.seq_q > 32 and problem.unified_max is None
    wide = KERNELS[_WIDE]
    return _WIDE if many and problem.dtype in wide.dtypes and wide.runs_on(device) else "decode"


def _tile_rows(problem: DecodeProblem) -> int:
    """Return the rows of a tile.

    Each tile of rows reads the keys once more, if from L2, and registers hold O of so many rows.
    """
    rows = problem.group * problem.seq_q
    size = ELEMENT_BYTES[problem.dtype]
    wide = problem.head_dim_v <= 128 and size == 2 and problem.unified_max is None
    return 16 if rows <= 16 or not wide else 32 if rows <= 32 else 64


def _bytes_of_16(problem: DecodeProblem) -> int:
    """Return the bytes of 16 keys and values, as compiled."""
    columns = _padded(problem.head_dim) + _padded(problem.head_dim_v)
    return 16 * columns * ELEMENT_BYTES[problem.dtype]


def _unit_bytes(problem: DecodeProblem) -> int:
    """Return the bytes of K and V of a sequence and head."""
    columns = problem.head_dim + problem.head_dim_v
    return _keys(problem) * columns * ELEMENT_BYTES[problem.dtype]


def _end_bytes(problem: DecodeProblem) -> int:
    """Return what a multiprocessor reads in the time that a unit's end and beginning take it."""
    rows = min(problem.group * problem.seq_q, 16)
    return _SECOND_END + rows * _SECOND_ROW + (_LOOK_UP if problem.is_paged else 0)


def _is_short(problem: DecodeProblem) -> bool:
    """Whether the ends of units take half as long as all their reading, or longer."""
    return _unit_bytes(problem) <= 2 * _end_bytes(problem)


def _units(problem: DecodeProblem, bm: int) -> int:
    """Return how many sequences, K/V heads and tiles of rows there are."""
    return problem.batch * problem.heads_kv * -(-problem.group * problem.seq_q // bm)


def _has_memory(problem: DecodeProblem, bm: int) -> bool:
    """Whether a block for each unit can leave pieces, as it must where lengths differ much."""
    rows, columns = min(problem.group * problem.seq_q, bm), _padded(problem.head_dim_v)
    return 4 * _partial_floats(_units(problem, bm), rows, columns) <= _MOST_PARTIAL


def _never_cut(problem: DecodeProblem, device: Device, bm: int) -> bool:
    """Whether units are so many, and so short, that a block each is best however lengths differ."""
    least = _MOST_SMALL if _has_memory(problem, bm) else _SOME_UNITS
    many = _units(problem, bm) > least * device.sm_count
    return many and _unit_bytes(problem) * ELEMENT_BYTES[problem.dtype] <= 2 * _NEVER_CUT


def _can_be_whole(problem: DecodeProblem, device: Device, bm: int) -> bool:
    """Whether each unit can have a block."""
    return _has_memory(problem, bm) or _never_cut(problem, device, bm)


def _rings(problem: DecodeProblem, device: Device, num_splits: int | None) -> _Rings:
    """Return the rings of tiles of 16 rows, where a multiprocessor has one block."""
    tile_bytes = _bytes_of_16(problem)
    if tile_bytes <= _TINY_TILE:
        return _TINY_RINGS
    if tile_bytes > _SMALL_TILE or num_splits is not None:
        return _RINGS
    read = problem.batch * problem.heads_kv * _unit_bytes(problem) / device.sm_count
    return _DEEP_RINGS if read <= _LITTLE else _RINGS


def _small_blocks(problem: DecodeProblem, device: Device) -> Variant | None:
    """Return the variant of which a multiprocessor has several blocks of a whole unit each, if any.

    Together they ask for as much as one large block, but nothing is cut and merged; and where one
    block follows another, others read meanwhile. They are not for a number of splits: then nothing
    may depend on the batch, as results would.
    """
    if _tile_rows(problem) > 16:
        return None
    units = _units(problem, 16)
    unit_bytes, end, short = _unit_bytes(problem), _end_bytes(problem), _is_short(problem)
    dims = _padded(problem.head_dim), _padded(problem.head_dim_v)
    few_warps = unit_bytes <= _TINY_UNIT if _bytes_of_16(problem) <= _SMALL_TILE else short
    made = _made_small(problem.dtype, dims, device, few_warps)
    of_each, each = units / device.sm_count, -(-units // device.sm_count)
    chosen = None
    if 1 < each <= _MOST_SMALL and unit_bytes <= _SHORT_UNIT:
        # Each multiprocessor has all its units at once, and some have one less; large blocks would
        # read equal shares, but one unit after the other, and nothing while one ends.
        uneven, in_turn = each * unit_bytes + end, of_each * (unit_bytes + end) + _SECOND_END
        if each - of_each <= _NEARLY_NONE or _UNEVEN * uneven < in_turn:
            chosen = next((v for v, blocks in reversed(made) if blocks >= each), None)
    many = each > _MOST_SMALL and unit_bytes <= end
    # Where there is no memory for pieces of all, two blocks a multiprocessor take equal shares.
    for variant, blocks in made if _can_be_whole(problem, device, 16) else made[-1:]:
        if chosen is None and (many or _in_waves(units, blocks * device.sm_count)):
            chosen = variant
    return None if chosen is None else _finding(chosen, problem)


@functools.cache
def _made_small(
    dtype: str, dims: tuple[int, int], device: Device, few_warps: bool
) -> tuple[tuple[Variant, int], ...]:
    """Return the variants of which several blocks fit, and how many, those of most blocks first.

    Registers suffice for more than fit of two warps with 128 columns: with 168 a thread, of the 190
    that it would have, they are faster. With 128 more so, but of NVRTC 13.5 they spill then.
    """
    tile_bytes = 16 * sum(dims) * ELEMENT_BYTES[dtype]
    shapes: tuple[tuple[int, int], ...]  # warps, and blocks for which registers must suffice
    if tile_bytes > _TILE:
        shapes = ((2, 2),)
    elif ELEMENT_BYTES[dtype] == 4:
        shapes = ((4, 2),)
    elif tile_bytes <= _SMALL_TILE:
        shapes = (*(((2, 8),) if few_warps else ()), (4, 4), (4, 3), (4, 2))
    elif dims == (128, 128):
        shapes = ((2, 6), (2, 4), (4, 2)) if few_warps else ((4, 2),)
    else:
        shapes = (4, 3), (4, 2)
    made = (Variant("decode", dtype, *dims, 16, 16, 2, *shape, kv="Contiguous") for shape in shapes)
    legal = (v for v in made if v.illegal(device) is None)
    return tuple((v, _resident(v, device)) for v in legal if _resident(v, device) > 1)


def _wide_rings(problem: DecodeProblem, device: Device, num_splits: int | None) -> _Rings:
    """Return the rings of tiles of 64 rows, which may not depend on the batch either."""
    units = _units(problem, 64)
    whole = _in_waves(units, device.sm_count) and _can_be_whole(problem, device, 64)
    whole = whole or _NEARLY_ALL < units / device.sm_count <= 1
    dims = _padded(problem.head_dim), _padded(problem.head_dim_v)
    # With these, sixteen warps spill twice as much.
    costly = problem.softcap or "Alibi" in problem.reads
    # Of 128 columns their tiles are of 32 keys: of two pages, where pages are of sixteens. Units of
    # 1 and 4 MB took 1.01 to 1.04 of the time so, of 256 KB 0.95.
    sixteens = dims == (128, 128) and problem.page_size % 32 == 16
    sixteens = sixteens and _unit_bytes(problem) > _SHORT_OF_SIXTEENS
    known = dims in _WHOLE_DIMS and num_splits is None and not costly and not sixteens
    return _WGMMA_WHOLE_RINGS if whole and known else _WGMMA_RINGS


def _in_waves(units: int, at_once: int) -> bool:
    """Whether a block each, beginning as others end, keep all multiprocessors busy to the end."""
    waves = units / at_once
    return waves >= _MANY_WAVES or (waves > 1 and -waves % 1 <= _NEARLY_NONE)


def _keys(problem: DecodeProblem) -> int:
    """Return the most keys that a sequence can have, of which nothing changes within a step.

    Those in front of a window do not count.
    """
    return -(-problem.visited // KEY_STEP) * KEY_STEP


def _tiles(problem: DecodeProblem, variant: Variant) -> int:
    """Return the most tiles of keys that a sequence's queries visit: at least one.

    Those of a window may begin and end anywhere.
    """
    tiles = -(-problem.capacity // variant.bn)
    return max(1, min(tiles, -(-(problem.visited - 1) // variant.bn) + 1))


def _finding(variant: Variant, problem: DecodeProblem) -> Variant:
    """Return a variant with a problem's score and its way of finding K and V."""
    if not problem.is_paged:
        kv = "Contiguous"
    elif problem.page_size % variant.bn == 0:
        kv = "PagedTiles"
    else:
        kv = "Paged" if problem.page_size % 16 else "PagedSixteens"
    return variant._replace(unified=problem.unified_max is not None, score=problem.score, kv=kv)


@functools.lru_cache(maxsize=4096)
def _variant(
    tile: tuple[str, str, tuple[int, int], int],
    team: int,
    rings: _Rings,
    page_size: int,
    device: Device,
) -> Variant:
    """Return the variant with the first rings that fit, of a kernel, dtype, head dims and rows."""
    kernel, dtype, head_dims, bm = tile
    d, dv = (_padded(n) for n in head_dims)
    size = ELEMENT_BYTES[dtype]
    made = functools.partial(Variant, kernel, dtype, d, dv, bm, kv="Contiguous")
    for bn, stages, warps in rings:
        variant = made(bn, stages, warps, 1)
        complaint = variant.illegal(device)
        asked = bn * stages * warps // team * (d + dv) * size
        found = bn <= _MOST_LOOKED_UP or page_size % 16 == 0
        if asked <= _MOST_ASKED and found and complaint is None:
            return variant
    raise ValueError(
        f"k_cache: {device.name} cannot decode {dtype} with these head dims: {complaint}"
    )


def _padded(head_dim: int) -> int:
    """Return the head dim that is compiled."""
    return next(n for n in (32, 64, 96, 128, 192, 256) if head_dim <= n)
