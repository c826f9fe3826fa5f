"""FlashAttention-2's backward pass on tensor cores, in 16 bits."""

from __future__ import annotations

from cufa.specs import bwd_block
from cufa.specs.backward import BackwardSpec
from cufa.specs.kernel_spec import Tiles, TileShape

# A thread holds dK and dV of a warp's 16 keys: half of head_dim + head_dim_v registers. Beyond 320
# columns two warps share keys, and hold one of the two each. sm_80, sm_90 and sm_100: 163 KiB of
# shared memory and more.
_SM80: Tiles = {
    (32, 32): (TileShape(64, 64, 2, 4, 2),),
    (64, 64): (TileShape(32, 128, 2, 8, 1),),
    (96, 96): (TileShape(32, 64, 2, 4, 2),),
    (128, 128): (TileShape(32, 64, 2, 4, 2), TileShape(16, 64, 2, 4, 2)),
    (192, 128): (TileShape(32, 64, 1, 4, 1), TileShape(16, 64, 1, 4, 1)),
    (192, 192): (TileShape(32, 64, 1, 8, 1),),
    (256, 256): (TileShape(32, 64, 1, 8, 1), TileShape(16, 64, 1, 8, 1)),
}
# sm_86, sm_89 and sm_120: 99 KiB, which one block has for itself.
_SM86: Tiles = {
    **_SM80,
    (96, 96): (TileShape(32, 64, 2, 4, 1),),
    (128, 128): (TileShape(32, 128, 1, 8, 1),),
    (256, 256): (TileShape(16, 64, 1, 8, 1),),
}

# Not measured: four fifths of the speed of fa2_mma.
_TFLOPS = {64: 275.0, 128: 330.0, 256: 280.0}

SPEC = BackwardSpec(
    name="bwd_mma",
    dtypes=("float16", "bfloat16"),
    tile_tables={80: _SM80, 86: _SM86, 90: _SM80, 120: _SM86},
    takes_tile=lambda v: bwd_block.takes_tile(v, shares_from=320, least_columns=16),
    tflops=_TFLOPS,
)
