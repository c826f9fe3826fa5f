"""dK and dV of wide heads on Hopper: a producer's warpgroup, and two that share the columns."""

from __future__ import annotations

from cufa.specs.arguments import TemplateArguments
from cufa.specs.backward import BackwardSpec, Tiles
from cufa.specs.tile_shape import TileShape

# Half of dK and of dV of 64 keys is half of head_dim registers, S^T or dP^T half of bm. Its tile is
# that of bwd_dq_wgmma, as both read the same lists of a BlockMask.
_TILES: Tiles = {(256, 256): (TileShape(128, 64, 1, 12, 1),)}


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    return {
        "K and V": 4 * v.bn * v.head_dim,
        "Q and dO": 4 * v.stages * v.bm * v.head_dim,
        "P and dS": 4 * v.bm * v.bn,
        "rows": 8 * v.bm,
        "barriers": 4 * 16 + 8,
    }


SPEC = BackwardSpec(
    "bwd_dkv_wgmma",
    ("float16", "bfloat16"),
    {90: _TILES},
    shared_memory=_shared_memory,
    archs=("sm_90a",),
    tma=True,
    gradients=("k", "v"),
    differentiates=False,
    tflops={256: 406.0},
)
