"""FlashAttention-2 in float32."""

from __future__ import annotations

from cufa.device import Device
from cufa.specs import fa2_block
from cufa.specs.kernel_spec import Tiles, TileShape
from cufa.specs.kv import LENGTHS
from cufa.specs.spec import Space, Spec, output, scores
from cufa.specs.template_arguments import TemplateArguments

_WIDE = 160  # columns of an output beyond which two warps share them

# float32 takes twice the shared memory, and twice the registers for P in two parts. From 192 on,
# two warps share their rows and each holds half of the columns of O. Head dims of Q/K up to 32 have
# an entry for any V, because their scores need CUDA cores to be accurate.
_SM90: Tiles = {
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
_SM80: Tiles = {
    **_SM90,
    (128, 128): (TileShape(64, 32, 1, 4, 2),),
    (192, 128): (TileShape(64, 16, 1, 4, 2),),
}
_SM86: Tiles = {
    **_SM90,
    (96, 96): (TileShape(64, 32, 1, 4, 2),),
    (128, 128): (TileShape(64, 16, 1, 4, 2),),
    (160, 160): (TileShape(64, 16, 1, 4, 1),),
    (192, 128): (TileShape(64, 32, 1, 4, 1),),
    (192, 192): (TileShape(64, 16, 1, 8, 1),),
    (256, 256): (TileShape(64, 16, 1, 8, 1),),
}
# sm_100: as sm_90, but ptxas spills registers at 160: such head dims are padded to 192.
_SM100: Tiles = {dims: tiles for dims, tiles in _SM90.items() if dims != (160, 160)}
# sm_120: as sm_86, but ptxas spills two registers of the larger tile.
_SM120: Tiles = {**_SM86, (192, 128): (TileShape(64, 16, 1, 4, 1),)}


def _row_warps(v: TemplateArguments) -> int:
    """Return how many warps share the rows; two share the columns of a wide output."""
    return v.warps // 2 if v.head_dim_v > _WIDE else v.warps


def _complaint(v: TemplateArguments, device: Device) -> str | None:
    if v.head_dim_v > _WIDE and v.head_dim_v % 64:
        return f"{v.kernel} splits a head_dim_v of more than {_WIDE}: it must be multiples of 64"
    return fa2_block.complaint(v, _row_warps(v))


SPEC = Spec(
    name="fa2_fp32",
    dtypes=("float32",),
    shared_memory=lambda v: fa2_block.shared_memory(v, _row_warps(v)),
    complaint=_complaint,
    head_dim_step=32,
    flops_per_byte=13,
    kvs=("Dense", *LENGTHS),
    tile_tables={80: _SM80, 86: _SM86, 90: _SM90, 100: _SM100, 120: _SM120},
    # P is held in two parts next to O, by both warps where two share a row; tiles take twice the
    # shared memory: smaller ones.
    space=Space(
        bm=(64, 128, 192),
        bn=(16, 32, 48, 64, 96, 128),
        stages=(1, 2, 3),
        warps=(4, 8),
        registers=lambda v: output(v) + 2 * scores(v) * v.warps / _row_warps(v) + 64,
    ),
)
