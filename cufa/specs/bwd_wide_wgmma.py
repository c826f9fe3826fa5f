"""Gradients of wide heads on Hopper: a kernel of dQ, and one of dK and dV."""

from __future__ import annotations

import functools

from cufa.specs.backward import hopper_spec
from cufa.specs.template_arguments import TemplateArguments
from cufa.specs.tile_shape import TileShape

_ROWS, _P_SLOTS = 64, 2


def _takes_tile(v: TemplateArguments) -> bool:
    return (v.bm, v.bn, v.warps, v.blocks_per_sm) == (128, 64, 12, 1)


def _shared_memory_dq(v: TemplateArguments) -> dict[str, int]:
    return {
        "Q and dO": 4 * v.bm * v.head_dim,
        "K and V": 2 * v.stages * v.bn * v.head_dim,
        "barriers": 16 * v.stages + 8,
    }


def _shared_memory_dkv(v: TemplateArguments) -> dict[str, int]:
    return {
        "K and V": 4 * v.bn * v.head_dim,
        "Q and dO": 4 * v.stages * _ROWS * v.head_dim,
        "P": 2 * _P_SLOTS * v.bn * _ROWS,
        "rows": 8 * v.stages * _ROWS,
        "barriers": 16 * (2 * v.stages + _P_SLOTS) + 8,
    }


_spec = functools.partial(hopper_spec, differentiates=False, tflops={256: 440.0})

# A consumer for each 64 rows. dQ of 64 rows is half of head_dim registers, S and dP half of bn
# each, dS a quarter. Stages hold K or V: those of the next keys come while K of the present ones is
# in use.
DQ = _spec(
    name="bwd_dq_wgmma",
    tile_tables={
        90: {
            (192, 192): (TileShape(128, 64, 4, 12, 1),),
            (256, 256): (TileShape(128, 64, 3, 12, 1),),
        }
    },
    takes_tile=lambda v: v.stages > 2 and _takes_tile(v),
    shared_memory=_shared_memory_dq,
    gradients=("q",),
)

# Warpgroups of dK and of dV: dK, or dV, of 64 keys is half of head_dim registers. bm is that of
# dQ's kernel, as both read the same lists of a BlockMask; a step takes 64 rows.
DKV = _spec(
    name="bwd_dkv_wgmma",
    tile_tables={
        90: {
            (192, 192): (TileShape(128, 64, 3, 12, 1),),
            (256, 256): (TileShape(128, 64, 2, 12, 1),),
        }
    },
    takes_tile=_takes_tile,
    shared_memory=_shared_memory_dkv,
    copied_rows=_ROWS,
    gradients=("k", "v"),
)
