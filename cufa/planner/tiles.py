"""The tile shapes that the planner chooses from, as data with the reason beside each number."""

from __future__ import annotations

from cufa.device import Device
from cufa.planner.hopper_costs import COSTS
from cufa.planner.tile_shape import TileShape

_Table = dict[tuple[int, int], tuple[TileShape, ...]]


# A table's keys are the padded head dims of Q/K and of V that are compiled; a problem takes the
# first that holds its own. Wider steps would waste products on zeros, narrower ones compile
# variants for few models. (192, 128) is multi-head latent attention.
#
# Where tiles have no costs, see costs.py, the first is for long queries. The second, with fewer
# rows, is for short queries and for grids that would leave multiprocessors idle; none where the
# first has 64 rows already.

# sm_90 and sm_100: 227 KiB of shared memory a block. 32 rows a warp halve the shared-memory reads
# of K and V per product, as long as O (head_dim_v registers a thread) leaves room: up to 128. One
# stage where two would leave a single block on a multiprocessor.
_MMA_SM90: _Table = {
    (32, 32): (TileShape(128, 64, 2, 4, 3), TileShape(64, 64, 2, 4, 4)),
    (64, 64): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 4)),
    (96, 96): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 3)),
    (128, 128): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (160, 160): (TileShape(64, 64, 2, 4, 2),),
    (192, 128): (TileShape(128, 32, 2, 4, 2), TileShape(64, 64, 1, 4, 2)),
    (192, 192): (TileShape(64, 64, 1, 4, 2),),
    (256, 256): (TileShape(64, 64, 1, 4, 2),),
}
# sm_80: 163 KiB. As above, in what lets two blocks share 164 KiB.
_MMA_SM80: _Table = {
    **_MMA_SM90,
    (64, 64): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 3)),
    (96, 96): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (128, 128): (TileShape(128, 32, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (160, 160): (TileShape(64, 64, 1, 4, 2),),
    (192, 128): (TileShape(128, 32, 1, 4, 2), TileShape(64, 64, 1, 4, 2)),
    (256, 256): (TileShape(64, 64, 1, 4, 1),),
}
# sm_86, sm_89 and sm_120: 99 KiB. Two blocks of at most 48 KiB.
_MMA_SM86: _Table = {
    (32, 32): (TileShape(128, 64, 2, 4, 3), TileShape(64, 64, 2, 4, 4)),
    (64, 64): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (96, 96): (TileShape(128, 64, 1, 4, 2), TileShape(64, 64, 1, 4, 2)),
    (128, 128): (TileShape(128, 32, 1, 4, 2), TileShape(64, 64, 1, 4, 2)),
    (160, 160): (TileShape(64, 32, 1, 4, 2),),
    (192, 128): (TileShape(64, 32, 1, 4, 2),),
    (192, 192): (TileShape(64, 32, 1, 4, 2),),
    (256, 256): (TileShape(64, 64, 1, 4, 1),),
}
# float32 takes twice the shared memory, and twice the registers for P in two parts. From 192 on,
# two warps share their rows and each holds half of the columns of O. Head dims of Q/K up to 32 have
# an entry for any V, because their scores need CUDA cores to be accurate.
_FP32_SM90: _Table = {
    (32, 32): (TileShape(128, 32, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (32, 256): (TileShape(64, 32, 1, 8, 1),),
    (64, 64): (TileShape(64, 32, 2, 4, 2),),
    (96, 96): (TileShape(64, 32, 2, 4, 2),),
    (128, 128): (TileShape(64, 32, 2, 4, 2),),
    (160, 160): (TileShape(64, 16, 2, 4, 2),),
    (192, 128): (TileShape(64, 32, 1, 4, 2),),
    (192, 192): (TileShape(64, 32, 1, 8, 1),),
    (256, 256): (TileShape(64, 32, 1, 8, 1),),
}
_FP32_SM80: _Table = {
    **_FP32_SM90,
    (128, 128): (TileShape(64, 32, 1, 4, 2),),
    (192, 128): (TileShape(64, 16, 1, 4, 2),),
}
_FP32_SM86: _Table = {
    (32, 32): (TileShape(128, 32, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (32, 256): (TileShape(64, 32, 1, 8, 1),),
    (64, 64): (TileShape(64, 32, 2, 4, 2),),
    (96, 96): (TileShape(64, 32, 1, 4, 2),),
    (128, 128): (TileShape(64, 16, 1, 4, 2),),
    (160, 160): (TileShape(64, 16, 1, 4, 1),),
    (192, 128): (TileShape(64, 32, 1, 4, 1),),
    (192, 192): (TileShape(64, 16, 1, 8, 1),),
    (256, 256): (TileShape(64, 16, 1, 8, 1),),
}
# sm_100: as sm_90, but ptxas spills registers at 160: such head dims are padded to 192.
_FP32_SM100: _Table = {dims: tiles for dims, tiles in _FP32_SM90.items() if dims != (160, 160)}
# sm_120: as sm_86, but ptxas spills two registers of the larger tile.
_FP32_SM120: _Table = {**_FP32_SM86, (192, 128): (TileShape(64, 16, 1, 4, 1),)}
# One block a head: as many rows and keys as fit, on eight warps.
_FA1: _Table = {
    **{pair: (TileShape(64, 64, 1, 8, 1),) for pair in _MMA_SM90},
    (256, 256): (TileShape(64, 32, 1, 8, 1),),
}
_FA1_SM86: _Table = {
    (32, 32): (TileShape(64, 64, 1, 8, 1),),
    (64, 64): (TileShape(64, 64, 1, 8, 1),),
    (96, 96): (TileShape(64, 64, 1, 8, 1),),
    (128, 128): (TileShape(64, 32, 1, 8, 1),),
    (160, 160): (TileShape(64, 32, 1, 8, 1),),
    (192, 128): (TileShape(64, 32, 1, 8, 1),),
    (192, 192): (TileShape(48, 32, 1, 8, 1),),
    (256, 256): (TileShape(24, 32, 1, 4, 1),),
}
# Hopper's own kernel: 64 rows a warpgroup, and four warps that fetch. Where V is narrow three
# warpgroups share a tile's K and V; from 192 columns on registers hold O of two. Tiles of fewer
# rows read K and V for fewer, and fewer other products run under a warpgroup's softmax, but they
# waste less: on the edge of a causal mask, on rows that a tile has and the problem has not, and on
# the last wave. Those of 64 rows come as two or more blocks a multiprocessor; from 192 columns on
# only one fits, alone with its softmax. Which are chosen from, and which is fastest for a problem,
# follows from their costs.
_WGMMA: _Table = {
    (d, dv): tuple(dict.fromkeys((*COSTS["fa3_wgmma", d, dv, False], *of_causal)))
    for (_, d, dv, causal), of_causal in COSTS.items()
    if causal
}
# By the compute capability from which on they hold.
_TABLES: dict[str, dict[int, _Table]] = {
    "fa1_fp32": {80: _FA1, 86: _FA1_SM86, 90: _FA1, 120: _FA1_SM86},
    "fa2_fp32": {
        80: _FP32_SM80,
        86: _FP32_SM86,
        90: _FP32_SM90,
        100: _FP32_SM100,
        120: _FP32_SM120,
    },
    "fa2_mma": {80: _MMA_SM80, 86: _MMA_SM86, 90: _MMA_SM90, 120: _MMA_SM86},
    "fa3_wgmma": {90: _WGMMA},
}


def _table(kernel: str, device: Device) -> _Table:
    tables = _TABLES[kernel]
    return tables[max(cc for cc in tables if cc <= device.compute_capability)]


def padded(kernel: str, device: Device, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Return the compiled head dims of a kernel that hold a problem's."""
    pairs = _table(kernel, device)
    return next(pair for pair in pairs if pair[0] >= head_dim and pair[1] >= head_dim_v)


def all_head_dims(kernel: str, device: Device) -> list[tuple[int, int]]:
    """Return all head dims of a kernel that are compiled for a device."""
    return list(_table(kernel, device))


def tiles(kernel: str, head_dims: tuple[int, int], device: Device) -> tuple[TileShape, ...]:
    """Return a kernel's tiles for padded head dims."""
    return _table(kernel, device)[head_dims]
