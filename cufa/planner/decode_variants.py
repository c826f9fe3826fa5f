"""Problem + Device -> Variant: which kernel decodes, in blocks of which shape."""

from __future__ import annotations

import functools

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.planner.decode_units import (
    MOST_SMALL,
    NEARLY_ALL,
    NEARLY_NONE,
    can_be_whole,
    end_bytes,
    in_waves,
    never_cut,
    padded,
    resident,
    second_end_bytes,
    unit_bytes,
    units_of,
)
from cufa.planner.decode_whole import whole_variant
from cufa.problem.problem import Problem
from cufa.specs import KERNELS
from cufa.specs.variant import Variant

_WIDE = "decode_wgmma"  # the kernel of many rows
_MOST_LOOKED_UP = 32  # keys of a tile, if each can be in another page
_SHORT_UNIT = 2 << 20  # bytes: of 1 MB two blocks were 4% faster on an H200, of 4 and 8 as fast
_UNEVEN = 1.03  # of the time: 31 x 2048 for which 0.985 is foretold were 1% slower
_Rings = tuple[tuple[int, int, int], ...]

_RINGS = ((16, 2, 8), (16, 2, 4), (16, 1, 4), (16, 1, 2))
"""Keys of a tile, stages and warps: the first that fits is taken. To read at full speed, a
multiprocessor must have asked for some 30 KB at any time; with more than 128 KB it reads slower.
Wide rows of float32 have one stage: four warps take half the time that two with two stages do."""

_MUCH = 512 << 10
"""Bytes. Where a multiprocessor reads more, large tiles have one stage, and all warps ask at once
for what lies together: memory gives it up to 2% faster, but of less the waiting takes longer."""

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

_TEAM_RINGS = ((32, 2, 8), (16, 2, 8), (16, 2, 4))
"""The same of 32 or 64 rows, where two warps share a ring."""

_TEAM_RINGS_OF_SIXTEENS = ((16, 3, 8), *_TEAM_RINGS)
"""Of 32 rows, where pages hold sixteens of keys and no tiles of 32: each tile then is of one page.
With rows of 64 columns that was 6% slower."""

_WGMMA_RINGS = ((64, 3, 8), (64, 2, 8), (32, 4, 8), (32, 2, 8))
"""The same of `decode_wgmma`, where four do."""

_WGMMA_WHOLE_RINGS = ((64, 2, 16), *_WGMMA_RINGS)
"""Where no unit is cut, or those that are very long: to add up twice as many teams takes long, and
longer with splits."""

_WHOLE_DIMS = (64, 64)
"""Head dims for which these are: sixteen warps spill registers, if not in the loop. Of 128 columns
eight took 0.98 to 1.01 of the time of sixteen with tiles of 32 keys."""


def variant_of(
    problem: Problem,
    device: Device,
    num_splits: int | None,
    kernel: str | Variant | None,
    small: Variant | None,
) -> Variant:
    """Return the variant that decodes a problem.

    Parameters
    ----------
    problem : Problem
    device : Device
    num_splits, kernel
        As of `cufa.planner.decode.plan`, and so are errors.
    small : Variant, optional
        That of `small_blocks`, which is taken for a call that names none.
    """
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


def _default(problem: Problem, device: Device) -> str:
    """Return the kernel of a call that names none."""
    many = problem.group * problem.seq_q > 32 and problem.unified_max is None
    wide = KERNELS[_WIDE]
    return _WIDE if many and problem.dtype in wide.dtypes and wide.runs_on(device) else "decode"


def _tile_rows(problem: Problem) -> int:
    """Return the rows of a tile.

    Each tile of rows reads the keys once more, if from L2, and registers hold O of so many rows.
    """
    rows = problem.group * problem.seq_q
    size = DTYPES[problem.dtype].bytes
    wide = problem.head_dim_v <= 128 and size == 2 and problem.unified_max is None
    return 16 if rows <= 16 or not wide else 32 if rows <= 32 else 64


def _bytes_of_16(problem: Problem) -> int:
    """Return the bytes of 16 keys and values, as compiled."""
    columns = padded(problem.head_dim) + padded(problem.head_dim_v)
    return 16 * columns * DTYPES[problem.dtype].bytes


def _rings(problem: Problem, device: Device, num_splits: int | None) -> _Rings:
    """Return the rings of tiles of 16 rows, where a multiprocessor has one block."""
    tile_bytes = _bytes_of_16(problem)
    if tile_bytes <= _TINY_TILE:
        return _TINY_RINGS
    if num_splits is not None:
        return _RINGS
    read = problem.batch * problem.heads_kv * unit_bytes(problem) / device.sm_count
    if tile_bytes <= _SMALL_TILE and read <= _LITTLE:
        return _DEEP_RINGS
    keys = 64 if tile_bytes <= _SMALL_TILE else 32 if tile_bytes <= _TILE else 16
    long = read > _MUCH and problem.page_size % 16 == 0
    # Of float32, products take longer than reading.
    long = long and (DTYPES[problem.dtype].bytes == 2 or tile_bytes > _TILE)
    return ((keys, 1, 8), *_RINGS) if long else _RINGS


def small_blocks(problem: Problem, device: Device) -> Variant | None:
    """Return the variant of which a multiprocessor has several blocks of a whole unit each, if any.

    Together they ask for as much as one large block, but nothing is cut and merged; and where one
    block follows another, others read meanwhile. They are not for a number of splits: then nothing
    may depend on the batch, as results would.
    """
    bm = _tile_rows(problem)
    if bm <= 32 and never_cut(problem, device, bm):
        found = whole_variant(problem, device, bm)
        return None if found is None else _finding(found, problem)
    if bm > 16:
        return None
    units, size, end = units_of(problem, 16), unit_bytes(problem), end_bytes(problem)
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    few_columns = _bytes_of_16(problem) <= _SMALL_TILE
    one_stage = problem.page_size % 16 == 0 and not (few_columns and problem.is_paged)
    made = _made_small(problem.dtype, dims, device, one_stage)
    of_each, each = units / device.sm_count, -(-units // device.sm_count)
    chosen = None
    if 1 < each <= MOST_SMALL and size <= _SHORT_UNIT:
        # Each multiprocessor has all its units at once, and some have one less; large blocks would
        # read equal ranges, but one unit after the other, and nothing while one ends.
        uneven, in_turn = each * size + end, of_each * (size + end) + second_end_bytes(0)
        if each - of_each <= NEARLY_NONE or _UNEVEN * uneven < in_turn:
            chosen = next((v for v, blocks in reversed(made) if blocks >= each), None)
    # Where there is no memory for splits of all, two blocks a multiprocessor take equal ranges.
    whole = can_be_whole(problem, device, 16)
    for variant, blocks in made if whole else made[-1:]:
        if chosen is None and in_waves(units, blocks * device.sm_count):
            chosen = variant
    return None if chosen is None else _finding(chosen, problem)


@functools.cache
def _made_small(
    dtype: str, dims: tuple[int, int], device: Device, one_stage: bool
) -> tuple[tuple[Variant, int], ...]:
    """Return the variants of which several blocks fit, and how many, those of most blocks first."""
    tile_bytes = 16 * sum(dims) * DTYPES[dtype].bytes

    def made(*shapes: tuple[int, int, int, int]) -> tuple[tuple[Variant, int], ...]:
        """Of keys, stages, warps, and blocks for which registers must suffice, those that fit."""
        variants = (Variant("decode", dtype, *dims, 16, *n, kv="Contiguous") for n in shapes)
        legal = (v for v in variants if v.illegal(device) is None)
        return tuple((v, resident(v, device)) for v in legal if resident(v, device) > 1)

    if tile_bytes > _TILE:
        return made((16, 1, 4, 2))
    large = DTYPES[dtype].bytes == 2 and one_stage and tile_bytes > _TINY_TILE
    two = large and made((64 if tile_bytes <= _SMALL_TILE else 32, 1, 4, 2))
    two = two or made((16, 2, 4, 2))
    if DTYPES[dtype].bytes == 4:
        return two
    if tile_bytes <= _SMALL_TILE:
        return *made((16, 2, 4, 4), (16, 2, 4, 3)), *two
    return two if dims == (128, 128) else (*made((16, 2, 4, 3)), *two)


def _wide_rings(problem: Problem, device: Device, num_splits: int | None) -> _Rings:
    """Return the rings of tiles of 64 rows, which may not depend on the batch either."""
    if never_cut(problem, device, 64):
        return _WGMMA_RINGS
    units = units_of(problem, 64)
    whole = in_waves(units, device.sm_count) and can_be_whole(problem, device, 64)
    whole = whole or NEARLY_ALL < units / device.sm_count <= 1
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    # With these, sixteen warps spill twice as much.
    costly = problem.softcap or "Alibi" in problem.reads
    known = dims == _WHOLE_DIMS and num_splits is None and not costly
    return _WGMMA_WHOLE_RINGS if whole and known else _WGMMA_RINGS


def _finding(variant: Variant, problem: Problem) -> Variant:
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
    d, dv = (padded(n) for n in head_dims)
    size = DTYPES[dtype].bytes
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
