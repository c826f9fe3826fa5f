"""FlashAttention-2 on tensor cores, in 16 bits."""

from __future__ import annotations

from cufa.dtypes import DTYPES
from cufa.specs import fa2_block
from cufa.specs.kernel_spec import Tiles, TileShape
from cufa.specs.kv import LENGTHS
from cufa.specs.spec import Space, Spec, output, scores
from cufa.specs.template_arguments import TemplateArguments

# sm_90 and sm_100: 227 KiB of shared memory a block. 32 rows a warp halve the shared-memory reads
# of K and V per product, as long as O (head_dim_v registers a thread) leaves room: up to 128. One
# stage where two would leave a single block on a multiprocessor.
_SM90: Tiles = {
    (32, 32): (TileShape(128, 64, 2, 4, 3), TileShape(64, 64, 2, 4, 4)),
    (64, 64): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 4)),
    (96, 96): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 3)),
    (128, 128): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (160, 160): (TileShape(64, 64, 2, 4, 2),),
    (192, 128): (TileShape(128, 32, 2, 4, 2), TileShape(64, 64, 1, 4, 2)),
    (192, 192): (TileShape(64, 64, 1, 4, 2),),
    (256, 256): (TileShape(64, 64, 1, 4, 2),),
}
# sm_80: 163 KiB. As above, in what lets two blocks share 164 KiB.
_SM80: Tiles = {
    **_SM90,
    (64, 64): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 3)),
    (96, 96): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (128, 128): (TileShape(128, 32, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (160, 160): (TileShape(64, 64, 1, 4, 2),),
    (192, 128): (TileShape(128, 32, 1, 4, 2), TileShape(64, 64, 1, 4, 2)),
    (256, 256): (TileShape(64, 64, 1, 4, 1),),
}
# sm_86, sm_89 and sm_120: 99 KiB. Two blocks of at most 48 KiB.
_SM86: Tiles = {
    (32, 32): (TileShape(128, 64, 2, 4, 3), TileShape(64, 64, 2, 4, 4)),
    (64, 64): (TileShape(128, 64, 2, 4, 2), TileShape(64, 64, 2, 4, 2)),
    (96, 96): (TileShape(128, 64, 1, 4, 2), TileShape(64, 64, 1, 4, 2)),
    (128, 128): (TileShape(128, 32, 1, 4, 2), TileShape(64, 64, 1, 4, 2)),
    (160, 160): (TileShape(64, 32, 1, 4, 2),),
    (192, 128): (TileShape(64, 32, 1, 4, 2),),
    (192, 192): (TileShape(64, 32, 1, 4, 2),),
    (256, 256): (TileShape(64, 64, 1, 4, 1),),
}


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    tiles = fa2_block.shared_memory(v, v.warps)
    o_bytes = DTYPES[v.dtype].bytes * v.bm * v.head_dim_v  # O takes their place
    return {**tiles, "rest of O": max(0, o_bytes - sum(tiles.values()))}


SPEC = Spec(
    name="fa2_mma",
    dtypes=("float16", "bfloat16"),
    shared_memory=_shared_memory,
    complaint=lambda v, device: fa2_block.complaint(v, v.warps),
    flops_per_byte=75,
    kvs=("Dense", *LENGTHS),
    tile_tables={80: _SM80, 86: _SM86, 90: _SM90, 120: _SM86},
    # One to four 16-row pieces a warp. Fewer than 32 keys a tile leave few products between two
    # barriers, and a third stage already hides more than one tile's latency.
    space=Space(
        bm=(64, 128, 192, 256),
        bn=(32, 48, 64, 80, 96, 112, 128, 160, 192),
        stages=(1, 2, 3),
        warps=(4, 8),
        registers=lambda v: output(v) + scores(v) + 40,
    ),
)
