"""FlashAttention-2's backward pass on Hopper: a producer's warpgroup, and one for each 64 keys."""

from __future__ import annotations

from cufa.specs.backward import computes, hopper_spec
from cufa.specs.kernel_spec import Tiles, TileShape
from cufa.specs.template_arguments import TemplateArguments

# dK and dV of 64 keys are half of head_dim + head_dim_v registers, S^T and dP^T half of bm each,
# and P^T and dS^T a quarter.
_TILES: Tiles = {
    (64, 64): (TileShape(128, 128, 2, 12, 1), TileShape(64, 128, 2, 12, 1)),
    (128, 128): (TileShape(64, 128, 2, 12, 1),),
}


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    return {
        "K twice and V": 6 * v.bn * v.head_dim,
        "Q and dO": 4 * v.stages * v.bm * v.head_dim,
        "dS": 4 * v.bm * v.bn,
        "dQ": 4 * v.bm * v.head_dim,
        "rows": 8 * v.stages * v.bm,
        "barriers": 32 * v.stages + 32 + 32 + 64,
    }


SPEC = hopper_spec(
    name="bwd_wgmma",
    tile_tables={90: _TILES},
    takes_tile=lambda v: v.bm in (64, 128) and (v.bn, v.warps, v.blocks_per_sm) == (128, 12, 1),
    shared_memory=_shared_memory,
    splits_groups=True,
    draws=True,
    is_large=computes,
    tflops={64: 521.0, 128: 576.0},
)
