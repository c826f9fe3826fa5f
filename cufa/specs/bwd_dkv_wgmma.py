"""dK and dV of wide heads on Hopper: warpgroups of a producer, of dK and of dV."""

from __future__ import annotations

from cufa.specs.backward import hopper_spec
from cufa.specs.kernel_spec import Tiles, TileShape
from cufa.specs.template_arguments import TemplateArguments

# dK, or dV, of 64 keys is half of head_dim registers. bm is that of bwd_dq_wgmma, as both read the
# same lists of a BlockMask; a step takes 64 rows.
_TILES: Tiles = {
    (192, 192): (TileShape(128, 64, 3, 12, 1),),
    (256, 256): (TileShape(128, 64, 2, 12, 1),),
}
_ROWS, _P_SLOTS = 64, 2


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    return {
        "K and V": 4 * v.bn * v.head_dim,
        "Q and dO": 4 * v.stages * _ROWS * v.head_dim,
        "P": 2 * _P_SLOTS * v.bn * _ROWS,
        "rows": 8 * v.stages * _ROWS,
        "barriers": 16 * (2 * v.stages + _P_SLOTS) + 8,
    }


SPEC = hopper_spec(
    name="bwd_dkv_wgmma",
    tile_tables={90: _TILES},
    takes_tile=lambda v: (v.bm, v.bn, v.warps, v.blocks_per_sm) == (128, 64, 12, 1),
    shared_memory=_shared_memory,
    copied_rows=_ROWS,
    gradients=("k", "v"),
    differentiates=False,
    tflops={256: 440.0},
)
