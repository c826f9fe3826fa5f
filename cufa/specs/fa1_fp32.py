"""FlashAttention-1 in float32: the scores pass through shared memory."""

from __future__ import annotations

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.specs.kernel_spec import Tiles, TileShape
from cufa.specs.spec import Space, Spec, output, scores
from cufa.specs.template_arguments import TemplateArguments

# One block a head: as many rows and keys as fit, on eight warps.
_WHOLE = (TileShape(64, 64, 1, 8, 1),)
_LARGE: Tiles = {
    **{(d, d): _WHOLE for d in (32, 64, 96, 128, 160)},
    **{(192, 128): _WHOLE, (192, 192): _WHOLE},
    (256, 256): (TileShape(64, 32, 1, 8, 1),),
}
_SM86: Tiles = {
    **_LARGE,
    **dict.fromkeys(((128, 128), (160, 160), (192, 128)), (TileShape(64, 32, 1, 8, 1),)),
    (192, 192): (TileShape(48, 32, 1, 8, 1),),
    (256, 256): (TileShape(24, 32, 1, 4, 1),),
}


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    """Return the bytes of the tiles; the rows of all but V are 4 longer."""
    element = DTYPES[v.dtype].bytes
    return {
        "Q": element * v.bm * (v.head_dim + 4),
        "K": element * v.bn * (v.head_dim + 4),
        "V": element * v.bn * v.head_dim_v,
        "P": element * v.bm * (v.bn + 4),
    }


def _complaint(v: TemplateArguments, device: Device) -> str | None:
    if v.stages != 1:
        return f"{v.kernel} has a single stage"
    if v.bm % (2 * v.warps) or v.bn % 16:
        return "bm must be a multiple of 2 * warps, and bn of 16"
    return None


SPEC = Spec(
    name="fa1_fp32",
    dtypes=("float32",),
    shared_memory=_shared_memory,
    complaint=_complaint,
    takes_heads=True,
    workspace=2,  # row maxima and sums, which pass from tile of keys to tile of keys
    flops_per_byte=2,
    scores=("Causal",),
    tile_tables={80: _LARGE, 86: _SM86, 90: _LARGE, 120: _SM86},
    # One block works on a head, so few large ones; the scores pass through shared memory, and two
    # copies of them are live while their sums are formed.
    space=Space(
        bm=(24, 32, 48, 64, 96, 128),
        bn=(32, 64, 128),
        stages=(1,),
        warps=(4, 8),
        registers=lambda v: max(output(v), 2 * scores(v)) + 48,
    ),
)
