"""The tile shapes that the planner chooses from, as data with the reason beside each number."""

from __future__ import annotations

from typing import Any, NamedTuple

from cufa.device import Device


class TileShape(NamedTuple):
    """The template arguments of a `Variant` that are free for a given problem."""

    bm: int
    bn: int
    stages: int
    warps: int
    blocks_per_sm: int
    ping_pong: bool = False


ANY_KEYS = range(2**31)


class Tile(NamedTuple):
    """A tile shape, and when the planner takes it.

    Attributes
    ----------
    shape : TileShape
    cost : float, optional
        Time that a busy multiprocessor needs for a row and key, as a multiple of what the fastest
        shape for these head dims needs. None where that was not measured.
    full, causal : range
        The numbers of keys for which it is taken, without a mask and with the causal one.
    """

    shape: TileShape
    cost: float | None = None
    full: range = ANY_KEYS
    causal: range = ANY_KEYS


_Table = dict[tuple[int, int], tuple[Tile, ...]]


def _tile(
    bm: int, bn: int, stages: int, warps: int, blocks: int, ping_pong: bool = False, **rule: Any
) -> Tile:
    return Tile(TileShape(bm, bn, stages, warps, blocks, ping_pong), **rule)


# A table's keys are the padded head dims of Q/K and of V that are compiled; a problem takes the
# first that holds its own. Wider steps would waste products on zeros, narrower ones compile
# variants for few models. (192, 128) is multi-head latent attention.
#
# Where tiles have no costs, the first is for long queries. The second, with fewer rows, is for
# short queries and for grids that would leave multiprocessors idle; none where the first has 64
# rows already.

# sm_90 and sm_100: 227 KiB of shared memory a block. 32 rows a warp halve the shared-memory reads
# of K and V per product, as long as O (head_dim_v registers a thread) leaves room: up to 128. One
# stage where two would leave a single block on a multiprocessor.
_MMA_SM90: _Table = {
    (32, 32): (_tile(128, 64, 2, 4, 3), _tile(64, 64, 2, 4, 4)),
    (64, 64): (_tile(128, 64, 2, 4, 2), _tile(64, 64, 2, 4, 4)),
    (96, 96): (_tile(128, 64, 2, 4, 2), _tile(64, 64, 2, 4, 3)),
    (128, 128): (_tile(128, 64, 2, 4, 2), _tile(64, 64, 2, 4, 2)),
    (160, 160): (_tile(64, 64, 2, 4, 2),),
    (192, 128): (_tile(128, 32, 2, 4, 2), _tile(64, 64, 1, 4, 2)),
    (192, 192): (_tile(64, 64, 1, 4, 2),),
    (256, 256): (_tile(64, 64, 1, 4, 2),),
}
# sm_80: 163 KiB. As above, in what lets two blocks share 164 KiB.
_MMA_SM80: _Table = {
    **_MMA_SM90,
    (64, 64): (_tile(128, 64, 2, 4, 2), _tile(64, 64, 2, 4, 3)),
    (96, 96): (_tile(128, 64, 2, 4, 2), _tile(64, 64, 2, 4, 2)),
    (128, 128): (_tile(128, 32, 2, 4, 2), _tile(64, 64, 2, 4, 2)),
    (160, 160): (_tile(64, 64, 1, 4, 2),),
    (192, 128): (_tile(128, 32, 1, 4, 2), _tile(64, 64, 1, 4, 2)),
    (256, 256): (_tile(64, 64, 1, 4, 1),),
}
# sm_86, sm_89 and sm_120: 99 KiB. Two blocks of at most 48 KiB.
_MMA_SM86: _Table = {
    (32, 32): (_tile(128, 64, 2, 4, 3), _tile(64, 64, 2, 4, 4)),
    (64, 64): (_tile(128, 64, 2, 4, 2), _tile(64, 64, 2, 4, 2)),
    (96, 96): (_tile(128, 64, 1, 4, 2), _tile(64, 64, 1, 4, 2)),
    (128, 128): (_tile(128, 32, 1, 4, 2), _tile(64, 64, 1, 4, 2)),
    (160, 160): (_tile(64, 32, 1, 4, 2),),
    (192, 128): (_tile(64, 32, 1, 4, 2),),
    (192, 192): (_tile(64, 32, 1, 4, 2),),
    (256, 256): (_tile(64, 64, 1, 4, 1),),
}
# float32 takes twice the shared memory, and twice the registers for P in two parts. From 192 on,
# two warps share their rows and each holds half of the columns of O. Head dims of Q/K up to 32 have
# an entry for any V, because their scores need CUDA cores to be accurate.
_FP32_SM90: _Table = {
    (32, 32): (_tile(128, 32, 2, 4, 2), _tile(64, 64, 2, 4, 2)),
    (32, 256): (_tile(64, 32, 1, 8, 1),),
    (64, 64): (_tile(64, 32, 2, 4, 2),),
    (96, 96): (_tile(64, 32, 2, 4, 2),),
    (128, 128): (_tile(64, 32, 2, 4, 2),),
    (160, 160): (_tile(64, 16, 2, 4, 2),),
    (192, 128): (_tile(64, 32, 1, 4, 2),),
    (192, 192): (_tile(64, 32, 1, 8, 1),),
    (256, 256): (_tile(64, 32, 1, 8, 1),),
}
_FP32_SM80: _Table = {
    **_FP32_SM90,
    (128, 128): (_tile(64, 32, 1, 4, 2),),
    (192, 128): (_tile(64, 16, 1, 4, 2),),
}
_FP32_SM86: _Table = {
    (32, 32): (_tile(128, 32, 2, 4, 2), _tile(64, 64, 2, 4, 2)),
    (32, 256): (_tile(64, 32, 1, 8, 1),),
    (64, 64): (_tile(64, 32, 2, 4, 2),),
    (96, 96): (_tile(64, 32, 1, 4, 2),),
    (128, 128): (_tile(64, 16, 1, 4, 2),),
    (160, 160): (_tile(64, 16, 1, 4, 1),),
    (192, 128): (_tile(64, 32, 1, 4, 1),),
    (192, 192): (_tile(64, 16, 1, 8, 1),),
    (256, 256): (_tile(64, 16, 1, 8, 1),),
}
# sm_100: as sm_90, but ptxas spills registers at 160: such head dims are padded to 192.
_FP32_SM100: _Table = {dims: tiles for dims, tiles in _FP32_SM90.items() if dims != (160, 160)}
# sm_120: as sm_86, but ptxas spills two registers of the larger tile.
_FP32_SM120: _Table = {**_FP32_SM86, (192, 128): (_tile(64, 16, 1, 4, 1),)}
# One block a head: as many rows and keys as fit, on eight warps.
_FA1: _Table = {
    **{pair: (_tile(64, 64, 1, 8, 1),) for pair in _MMA_SM90},
    (256, 256): (_tile(64, 32, 1, 8, 1),),
}
_FA1_SM86: _Table = {
    (32, 32): (_tile(64, 64, 1, 8, 1),),
    (64, 64): (_tile(64, 64, 1, 8, 1),),
    (96, 96): (_tile(64, 64, 1, 8, 1),),
    (128, 128): (_tile(64, 32, 1, 8, 1),),
    (160, 160): (_tile(64, 32, 1, 8, 1),),
    (192, 128): (_tile(64, 32, 1, 8, 1),),
    (192, 192): (_tile(48, 32, 1, 8, 1),),
    (256, 256): (_tile(24, 32, 1, 4, 1),),
}
# Hopper's own kernel: 64 rows a warpgroup, and four warps that fetch. Where V is narrow three
# warpgroups share a tile's K and V; from 192 columns on registers hold O of two. Fewer rows waste
# less: on the edge of a causal mask, on rows that a tile has and the problem has not, and on the
# last wave. The costs are what they lose otherwise: with each warpgroup less, K and V are read for
# fewer rows, and fewer other products run under a warpgroup's softmax. Tiles of 64 rows come as two
# or three blocks a multiprocessor; from 192 columns on only one fits, alone with its softmax. They
# are a matter of the multiprocessor, which is the same in all of Hopper, and were measured on an
# H200 for 64 and 128 columns, see docs/kernels.md; those of other entries are taken after them.
_SHORT, _LONG = range(2049), range(2049, 2**31)
_NEVER = range(0)
_WGMMA: _Table = {
    (32, 32): (
        _tile(192, 128, 2, 16, 1, True, cost=1.0),
        # 64 keys a tile: sequences of 128 are common here, and 96 would make 192 of them.
        _tile(64, 64, 3, 8, 3, cost=1.25),
    ),
    (64, 64): (
        # A third stage is 1% faster, but for masks over many keys, where it does nothing.
        _tile(192, 128, 3, 16, 1, True, cost=1.0, causal=_SHORT),
        _tile(192, 128, 2, 16, 1, True, cost=1.0, full=_NEVER, causal=_LONG),
        _tile(64, 64, 3, 8, 3, cost=1.25),
    ),
    (96, 96): (
        _tile(192, 112, 2, 16, 1, True, cost=1.0),
        _tile(64, 80, 2, 8, 2, cost=1.19),
    ),
    (128, 128): (
        # A third stage is 1% faster, too. But it takes the place of a third slot of Q, for which
        # causal tiles, many of them short, have more use; and for most keys it does nothing.
        _tile(192, 80, 3, 16, 1, True, cost=1.0, full=range(8193), causal=_NEVER),
        _tile(192, 80, 2, 16, 1, True, cost=1.0, full=range(8193, 2**31)),
        _tile(128, 128, 2, 12, 1, True, cost=1.06),
        _tile(64, 64, 2, 8, 2, cost=1.19),
    ),
    (192, 128): (
        _tile(192, 80, 2, 16, 1, True, cost=1.0),
        _tile(64, 48, 2, 8, 2, cost=1.25),
    ),
    (192, 192): (
        _tile(128, 96, 2, 12, 1, True, cost=1.0),
        _tile(64, 96, 2, 8, 1, cost=1.5),
    ),
    (256, 256): (
        # Turns are 1% faster for few keys, and do nothing for many, or with few of a causal tile.
        _tile(128, 64, 2, 12, 1, True, cost=1.0, full=_SHORT, causal=range(513, 1025)),
        _tile(128, 64, 2, 12, 1, cost=1.0),
        _tile(64, 64, 2, 8, 1, cost=1.5),
    ),
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


def tiles(kernel: str, head_dims: tuple[int, int], device: Device) -> tuple[Tile, ...]:
    """Return a kernel's tiles for padded head dims."""
    return _table(kernel, device)[head_dims]


def tile_shapes(kernel: str, head_dims: tuple[int, int], device: Device) -> list[TileShape]:
    """Return the shapes of a kernel's tiles for padded head dims."""
    return [tile.shape for tile in tiles(kernel, head_dims, device)]
