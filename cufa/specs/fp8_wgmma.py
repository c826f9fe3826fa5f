"""Attention in 8 bits on Hopper: a producer's warpgroup, and a consumer for each 64 rows."""

from __future__ import annotations

import itertools

import numpy as np

from cufa.features.parts import are_apart
from cufa.specs.kernel_spec import KernelSpec, TileShape
from cufa.specs.kv import LENGTHS
from cufa.specs.params import MAPS, PARAMS, whole
from cufa.specs.structs import extended, struct
from cufa.specs.template_arguments import NUMBERS, TemplateArguments, equal_registers

KEYS = 128
"""Keys of a block of V, see ``VTile8`` of the kernel; a scale of K or V is for as many or more."""

SCORES = (
    *("FineSoftcap", "Alibi"),
    *("Causal", "TopLeft", "WindowLeft", "WindowRight", "AttentionChunk"),
    *("Sinks", "Dropout"),
)
"""The parts of a score that it takes."""

_SCALES = struct(("u8", "data"), ("i4", "stride block_log2"))


def _derived(bm: int) -> dict[str, int]:
    """Return four warps for each 64 rows and four of the producer, and one block."""
    return {"warps": bm // 16 + 4, "blocks_per_sm": 1}


def _tile(bm: int, stages: int) -> TileShape:
    """Return a tile, whose consumers take turns."""
    return TileShape(bm, KEYS, stages, **_derived(bm), ping_pong=True)


# By the wider of the head dims. With 128 columns of O there are registers for a third consumer.
_TILES = {
    **dict.fromkeys((64, 96, 128), _tile(192, 4)),
    **dict.fromkeys((192, 256), _tile(128, 2)),
}
HEAD_DIMS = tuple(_TILES)
"""Head dims that it is compiled for."""


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    """Return what a block holds, as ``kernels/fa3_smem.cuh`` lays it out."""
    ring = v.stages * v.bn * (v.head_dim + v.head_dim_v)
    slot = v.bm * max(v.head_dim, v.head_dim_v)
    slots = max(2, min(3, (227 * 1024 - 1024 - ring) // slot))
    parts = v.bm // 64 if are_apart(v.score) else 1
    # A tile, which keys its parts' rows visit, and its sequence's lengths.
    work = 4 * (3 + 4 * parts) + 16 * (v.kv in LENGTHS)
    return {
        "Q and O": slots * slot,
        "K and V": ring,
        "barriers": 16 * slots + 32 * v.stages,
        "work items": 2 * slots * work,
    }


def parameter(score: tuple[str, ...], kv: str = "Dense") -> np.dtype:
    """Return the layout of what a launch passes by value."""
    way = extended(LENGTHS.get(kv, np.dtype([])), (_SCALES, "scales_q scales_k scales_v"))
    return whole(PARAMS, score, way, MAPS)


SPEC = KernelSpec(
    name="fp8_wgmma",
    dtypes=("float16", "bfloat16"),  # of the result
    shared_memory=_shared_memory,
    arguments=(*NUMBERS[:5], "ping_pong"),
    derived=_derived,
    archs=("sm_90a",),
    tma=True,
    persistent=True,
    launch_registers=lambda v: equal_registers(v.threads),
    tile_tables={
        90: {(d, dv): (_TILES[max(d, dv)],) for d, dv in itertools.product(HEAD_DIMS, repeat=2)}
    },
)
