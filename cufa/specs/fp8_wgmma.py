"""Attention in 8 bits on Hopper: a producer's warpgroup, and a consumer for each 64 rows."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cufa.device import Device
from cufa.specs.instance import Instance, equal_registers
from cufa.specs.kv import LENGTHS
from cufa.specs.params import MAPS, PARAMS, whole

KEYS = 128
"""Keys of a block of V, and of all scales of K and V at least: ``VTile8`` of the kernel."""

KVS = ("Dense", "Padded", "Varlen")
"""The ways of ``kernels/kv.cuh`` that its sequences can be of."""

SCORES = (
    *("FineSoftcap", "Alibi"),
    *("Causal", "TopLeft", "WindowLeft", "WindowRight", "AttentionChunk"),
    *("Sinks", "Dropout"),
)
"""The parts of a score that it takes."""

_SCALES = np.dtype([("data", "u8"), ("stride", "i4"), ("block_log2", "i4")], align=True)
_WORK_BYTES, _LENGTHS_BYTES = 28, 16  # of a tile of rows under way, and of a sequence's lengths

# Scores that are computed from others, which takes registers
_COMPUTED = frozenset(("FineSoftcap", "Alibi"))


class Fp8Tile(NamedTuple):
    """The template arguments that are free for given head dims, in order.

    Attributes
    ----------
    bm, bn, stages : int
        Rows and keys of a tile, and slots of K and V.
    piece, in_flight : int
        Columns of a piece of P V, and how many pieces are computed at once.
    ping_pong : bool
        Whether consumers take turns.
    """

    bm: int
    bn: int
    stages: int
    piece: int
    in_flight: int
    ping_pong: bool = True

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 2 * self.bm + 128


# By the wider of the head dims. With 64 columns of O there are registers for a third consumer.
_TILES = MappingProxyType(
    {
        64: (192, 128, 4),
        96: (128, 256, 3),
        128: (128, 256, 2),
        192: (128, 128, 2),
        256: (128, 128, 2),
    }
)
_NARROW = MappingProxyType({96: (128, 128, 4), 128: (128, 128, 4)})  # for computed scores
# By head dim of V
_PIECES = MappingProxyType({64: 64, 96: 96, 128: 128, 192: 64, 256: 64})


class Fp8Spec(NamedTuple):
    """The facts about the kernel that other rooms use.

    Attributes
    ----------
    name : str
        Name of the ``__global__`` function, of its file, and of its spec's file.
    dtypes : tuple of str
        Dtypes that the result can have.
    head_dims : tuple of int
        Head dims that it is compiled for.
    archs : tuple of str
    """

    name: str
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    archs: tuple[str, ...]

    def runs_on(self, device: Device) -> bool:
        """Whether a device can run it."""
        return device.arch in self.archs

    def tile(self, head_dim: int, head_dim_v: int, score: tuple[str, ...] = ()) -> Fp8Tile:
        """Return the tile of compiled head dims and the parts of a score."""
        widest = max(head_dim, head_dim_v)
        tiles = _TILES if _COMPUTED.isdisjoint(score) else {**_TILES, **_NARROW}
        bm, bn, stages = tiles[widest]
        # Sums of P V take the registers of S.
        piece = _PIECES[head_dim_v]
        units = head_dim_v // piece * (bn // KEYS)
        return Fp8Tile(bm, bn, stages, piece, min(2, units, bn // piece))

    def compiled(self, head_dim: int) -> int:
        """Return the least of `head_dims` that holds rows of a head dim."""
        return next(n for n in self.head_dims if n >= head_dim)

    def instance(
        self,
        dtype: str,
        head_dim: int,
        head_dim_v: int,
        score: tuple[str, ...] = (),
        kv: str = "Dense",
    ) -> Instance:
        """Return the instantiation that the compiler takes.

        Parameters
        ----------
        dtype : str
            Dtype of the result.
        head_dim, head_dim_v : int
            Two of `head_dims`.
        score : tuple of str
            The parts of the score.
        kv : str
            One of `KVS`.
        """
        tile = self.tile(head_dim, head_dim_v, score)
        numbers = head_dim, head_dim_v, *tile
        smem_bytes = _smem_bytes(tile, head_dim, head_dim_v, kv)
        way = f"Quantized<{kv}>"
        return Instance(
            *(self.name, (dtype,), numbers, score, way, smem_bytes),
            is_dependent=False,
            launch_registers=equal_registers(tile.threads),
        )


def _smem_bytes(tile: Fp8Tile, head_dim: int, head_dim_v: int, kv: str) -> int:
    """Return the shared memory of a block, as ``kernels/fa3_smem.cuh`` lays it out."""
    ring = tile.stages * tile.bn * (head_dim + head_dim_v)
    slot = tile.bm * max(head_dim, head_dim_v)
    slots = max(2, min(3, (227 * 1024 - 1024 - ring) // slot))
    work = _WORK_BYTES + _LENGTHS_BYTES * (kv in LENGTHS)
    scales = tile.stages * 2 * tile.bn // KEYS * 4
    return slots * slot + ring + 16 * slots + 32 * tile.stages + 2 * slots * work + scales


def parameter(score: tuple[str, ...], kv: str = "Dense") -> np.dtype:
    """Return the layout of what a launch passes by value."""
    way = [
        *((number.name, number.dtype) for number in LENGTHS.get(kv, ())),
        *((f"scales_{name}", _SCALES) for name in "qkv"),
    ]
    return whole(PARAMS, score, np.dtype(way, align=True), MAPS)


SPEC = Fp8Spec("fp8_wgmma", ("float16", "bfloat16"), tuple(_TILES), ("sm_90a",))
