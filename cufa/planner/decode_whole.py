"""Problem + Device -> Variant: which blocks decode units that are never cut, one each.

Nothing is cut then, and a variant that is `whole` knows it when it is compiled: it has a third of
the instructions, and registers for twice as many warps.
"""

from __future__ import annotations

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.planner.decode_units import keys_of, padded, resident, unit_bytes, units_of
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

_ASKED, _ASKED_OF_LITTLE = 128 << 10, 64 << 10
"""Bytes that the blocks of a multiprocessor ask for at a time, all together, and where it has no
160 KB of shared memory: to read at full speed takes some 30 KB, and with more it reads slower."""

_MOST_KEYS = 64  # of a tile
_MANY_ROWS = 32  # of a tile that two warps share

_BLOCKS = ((24 << 10, 8), (96 << 10, 4), (512 << 10, 2))
"""Bytes below which a multiprocessor has so many units at once: some are read while others begin
and end, but memory gives what lies together in larger pieces sooner."""

_BLOCKS_IN_PAGES = ((64 << 10, 8), ((3 << 19) + 1, 4))
"""The same where each looks up its pages first."""

_WARPS = {8: 2, 4: 4, 2: 4, 1: 8}


def whole_variant(problem: Problem, device: Device, bm: int) -> Variant | None:
    """Return the variant of which each block has a unit, but for its score; None if none fits.

    Parameters
    ----------
    problem : Problem
        Of units that are never cut, see `cufa.planner.decode_units.never_cut`.
    device : Device
    bm : int
        Rows of a tile, up to 32.
    """
    team = 2 if bm == _MANY_ROWS else 1
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    key_bytes = sum(dims) * DTYPES[problem.dtype].bytes
    most = _ASKED if device.smem_per_sm >= 160 << 10 else _ASKED_OF_LITTLE
    limits = _BLOCKS_IN_PAGES if problem.is_paged else _BLOCKS
    blocks = next((n for size, n in limits if unit_bytes(problem) < size), 1)
    each = max(1, -(-units_of(problem, bm) // device.sm_count))
    while blocks // 2 >= each:
        blocks //= 2
    if team == 2:
        blocks = 2
    while blocks > 1 and blocks * 2 * 16 * key_bytes > most:
        blocks //= 2
    asked, warps = most // blocks, _WARPS[blocks]
    while warps > 2 and warps * 16 * key_bytes > asked:
        warps //= 2
    # As many keys as fit, but two tiles for each warp.
    fit, own = asked // (warps * key_bytes), keys_of(problem) // (2 * warps)
    bn = next((keys for keys in (_MOST_KEYS, 32) if keys <= min(fit, own)), 16)
    if problem.page_size % 16:  # a tile of many pages is looked up more often
        bn = 16
    stages = 1 if bn == _MOST_KEYS else max(1, min(fit // bn, 3))
    warps *= team
    variant = Variant(
        *("decode", problem.dtype, *dims, bm, bn, stages, warps, blocks), kv="Contiguous"
    )
    if variant.illegal(device) is not None:
        return None
    return variant._replace(blocks_per_sm=resident(variant, device))
