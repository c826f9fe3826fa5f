"""dQ of wide heads on Hopper: a producer's warpgroup, and a consumer for each 64 rows."""

from __future__ import annotations

from cufa.specs.backward import hopper_spec
from cufa.specs.kernel_spec import Tiles, TileShape
from cufa.specs.template_arguments import TemplateArguments

# dQ of 64 rows is half of head_dim registers, S and dP half of bn each, dS a quarter. Stages hold K
# or V: those of the next keys come while K of the present ones is in use.
_TILES: Tiles = {
    (192, 192): (TileShape(128, 64, 4, 12, 1),),
    (256, 256): (TileShape(128, 64, 3, 12, 1),),
}


def _takes_tile(v: TemplateArguments) -> bool:
    return v.stages > 2 and (v.bm, v.bn, v.warps, v.blocks_per_sm) == (128, 64, 12, 1)


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    return {
        "Q and dO": 4 * v.bm * v.head_dim,
        "K and V": 2 * v.stages * v.bn * v.head_dim,
        "barriers": 16 * v.stages + 8,
    }


SPEC = hopper_spec(
    name="bwd_dq_wgmma",
    tile_tables={90: _TILES},
    takes_tile=_takes_tile,
    shared_memory=_shared_memory,
    gradients=("q",),
    differentiates=False,
    tflops={256: 440.0},
)
