"""FlashAttention-2's backward pass: on tensor cores in 16 bits, and in float32."""

from __future__ import annotations

from cufa.specs.backward import ROW_UNIT, BackwardSpec
from cufa.specs.kernel_spec import Tiles
from cufa.specs.template_arguments import TemplateArguments
from cufa.specs.tile_shape import TileShape


def _takes_tile(v: TemplateArguments, shares_from: int, least_columns: int) -> bool:
    """Whether the warps of a block share its keys, and its tile of dQ, in whole steps.

    ``kernels/bwd_block.cuh`` asserts it.

    Parameters
    ----------
    v : TemplateArguments
    shares_from : int
        Columns of K and V together beyond which two warps share keys.
    least_columns : int
        Columns of dQ that a warp computes at least.
    """
    warps = v.warps // 2 if v.head_dim + v.head_dim_v > shares_from else v.warps
    # An odd number of warps would copy rows whose swizzles differ.
    if v.warps % 2 or v.bn % (16 * warps) or v.bm % 16 or ROW_UNIT % v.bm or v.stages > 2:
        return False
    row_parts = min(v.bm // 16, warps)
    return warps % row_parts == 0 and v.head_dim % (warps // row_parts * least_columns) == 0


# A thread holds dK and dV of a warp's 16 keys: half of head_dim + head_dim_v registers. Beyond 320
# columns two warps share keys, and hold one of the two each. sm_80, sm_90 and sm_100: 163 KiB of
# shared memory and more.
_MMA_SM80: Tiles = {
    (32, 32): (TileShape(64, 64, 2, 4, 2),),
    (64, 64): (TileShape(32, 128, 2, 8, 1),),
    (96, 96): (TileShape(32, 64, 2, 4, 2),),
    (128, 128): (TileShape(32, 64, 2, 4, 2), TileShape(16, 64, 2, 4, 2)),
    (192, 128): (TileShape(32, 64, 1, 4, 1), TileShape(16, 64, 1, 4, 1)),
    (192, 192): (TileShape(32, 64, 1, 8, 1),),
    (256, 256): (TileShape(32, 64, 1, 8, 1), TileShape(16, 64, 1, 8, 1)),
}
# sm_86, sm_89 and sm_120: 99 KiB, which one block has for itself.
_MMA_SM86: Tiles = {
    **_MMA_SM80,
    (96, 96): (TileShape(32, 64, 2, 4, 1),),
    (128, 128): (TileShape(32, 128, 1, 8, 1),),
    (256, 256): (TileShape(16, 64, 1, 8, 1),),
}

# Not measured: four fifths of the speed of fa2_mma.
_MMA_TFLOPS = {64: 275.0, 128: 330.0, 256: 280.0}

MMA = BackwardSpec(
    name="bwd_mma",
    dtypes=("float16", "bfloat16"),
    tile_tables={80: _MMA_SM80, 86: _MMA_SM86, 90: _MMA_SM80, 120: _MMA_SM86},
    takes_tile=lambda v: _takes_tile(v, shares_from=320, least_columns=16),
    tflops=_MMA_TFLOPS,
)

# Operands in two parts take twice the registers, and tiles twice the shared memory: beyond 96
# columns of dK and dV two warps share keys. sm_80, sm_90 and sm_100: 163 KiB and more; there two
# stages of 128 columns spill 72 bytes and take 0.92 of the time of one, which spills none.
_FP32_SM80: Tiles = {
    (32, 32): (TileShape(32, 32, 2, 2, 2),),
    (64, 64): (TileShape(32, 64, 2, 8, 1),),
    (128, 128): (TileShape(32, 64, 2, 8, 1),),
    (192, 192): (TileShape(16, 32, 1, 4, 1),),
    (256, 256): (TileShape(16, 32, 1, 4, 1),),
}
# sm_86, sm_89 and sm_120: 99 KiB.
_FP32_SM86: Tiles = {**_FP32_SM80, (128, 128): (TileShape(16, 32, 1, 4, 1),)}

# At 256 that of the same tile at 128.
_FP32_TFLOPS = {128: 42.0, 256: 35.0}

FP32 = BackwardSpec(
    name="bwd_fp32",
    dtypes=("float32",),
    tile_tables={80: _FP32_SM80, 86: _FP32_SM86, 90: _FP32_SM80, 120: _FP32_SM86},
    takes_tile=lambda v: _takes_tile(v, shares_from=96, least_columns=32),
    tflops=_FP32_TFLOPS,
)
