"""FlashAttention-2's backward pass in float32."""

from __future__ import annotations

from cufa.specs import bwd_block
from cufa.specs.backward import BackwardSpec
from cufa.specs.kernel_spec import Tiles, TileShape

# Operands in two parts take twice the registers, and tiles twice the shared memory: beyond 96
# columns of dK and dV two warps share keys. sm_80, sm_90 and sm_100: 163 KiB and more; there two
# stages of 128 columns spill 72 bytes and take 0.92 of the time of one, which spills none.
_SM80: Tiles = {
    (32, 32): (TileShape(32, 32, 2, 2, 2),),
    (64, 64): (TileShape(32, 64, 2, 8, 1),),
    (128, 128): (TileShape(32, 64, 2, 8, 1),),
    (192, 192): (TileShape(16, 32, 1, 4, 1),),
    (256, 256): (TileShape(16, 32, 1, 4, 1),),
}
# sm_86, sm_89 and sm_120: 99 KiB.
_SM86: Tiles = {**_SM80, (128, 128): (TileShape(16, 32, 1, 4, 1),)}

# At 256 that of the same tile at 128.
_TFLOPS = {128: 42.0, 256: 35.0}

SPEC = BackwardSpec(
    name="bwd_fp32",
    dtypes=("float32",),
    tile_tables={80: _SM80, 86: _SM86, 90: _SM80, 120: _SM86},
    takes_tile=lambda v: bwd_block.takes_tile(v, shares_from=96, least_columns=32),
    tflops=_TFLOPS,
)
