"""FlashAttention-3 on Hopper: a producer's warpgroup, and a consumer for each 64 rows."""

from __future__ import annotations

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.features.parts import are_apart, edges, part_named
from cufa.features.user_functions import BLOCKS
from cufa.specs.hopper_costs import COSTS
from cufa.specs.kernel_spec import Tiles
from cufa.specs.kv import LENGTHS
from cufa.specs.spec import Space, Spec
from cufa.specs.template_arguments import NUMBERS, TemplateArguments, equal_registers
from cufa.specs.tile import panel_columns

WGMMA_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
"""The N of wgmma that ``kernels/ptx_sm90.cuh`` has."""

# 64 rows a warpgroup, and four warps that fetch. Where V is narrow three warpgroups share a tile's
# K and V; from 192 columns on registers hold O of two. Tiles of fewer rows read K and V for fewer,
# and fewer other products run under a warpgroup's softmax, but they waste less: on the edge of a
# causal mask, on rows that a tile has and the problem has not, and on the last wave. Tiles of 64
# rows come as two or more blocks a multiprocessor; from 192 columns on only one fits, alone with
# its softmax. Which are chosen from, and which is fastest for a problem, follows from their costs.
_TILES: Tiles = {
    (d, dv): tuple(dict.fromkeys((*COSTS[d, dv, False], *of_causal)))
    for (d, dv, causal), of_causal in COSTS.items()
    if causal
}

_COMPUTED = ("softcap", "alibi_slopes", "bias", "score_mod")
"""Arguments that change scores to other than the scale times Q K^T."""


def _pair_bytes(v: TemplateArguments) -> int:
    """Each warp's 16 rows of biases and masks, as kernels/pair_tiles_sm90.cuh lays them out."""
    of_warp = 0
    for part in map(part_named, v.score):
        if "k" in part.axes:
            element = DTYPES[part.dtype].bytes if part.dtype in DTYPES else 1
            row = -(-v.bn // 32) * 4 if part.dtype == "uint8" else v.bn * element
            of_warp += 16 * 8 + -(-16 * row // 128) * 128  # where the rows are, and the rows
    return v.bm // 16 * of_warp


def _slot_bytes(v: TemplateArguments) -> int:
    """Return the bytes of a slot of Q and O."""
    return DTYPES[v.dtype].bytes * v.bm * max(v.head_dim, v.head_dim_v)


def _ring_bytes(v: TemplateArguments) -> int:
    """Return the bytes of the rings of K and V."""
    return DTYPES[v.dtype].bytes * v.stages * v.bn * (v.head_dim + v.head_dim_v)


def q_slots(v: TemplateArguments) -> int:
    """Return how many slots of Q and O there are: up to three, as many as fit."""
    room = 227 * 1024 // max(1, v.blocks_per_sm) - 1024 - _ring_bytes(v) - _pair_bytes(v)
    return max(1, min(3, room // max(1, _slot_bytes(v))))


def _schedule(v: TemplateArguments) -> str:
    """Return how ``kernels/fa3_schedule.cuh`` has the kernel order its work."""
    if q_slots(v) == 1:  # where Q waits for its slot, and whether the first K waits behind it
        is_masked_and_wide = v.head_dim > 192 and any(part_named(x).right_edge for x in v.score)
        q_first = _skips_first_keys(v) or is_masked_and_wide or v.bm // 64 > 2
        return "General" if q_first else "Plain"
    # Wide tiles of scores that take long to compile
    is_long = any(part_named(part).argument in _COMPUTED for part in v.score)
    is_long = is_long or _skips_first_keys(v) or v.kv == "Varlen"
    return "General" if is_long and v.bn > 64 else "Plain"


def _skips_first_keys(v: TemplateArguments) -> bool:
    """Return whether some tiles of rows do not begin with the first keys."""
    return BLOCKS in v.score or any(part_named(part).left_edge for part in v.score)


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    slots = q_slots(v)
    parts = v.bm // 64 if are_apart(v.score) else 1
    # A tile, which keys its parts' rows visit, and its sequence's lengths.
    work = 4 * (3 + 4 * parts) + 16 * (v.kv in LENGTHS)
    if BLOCKS in v.score:  # and where the map has which keys it visits, an address
        work = -(-(work + 8) // 8) * 8
    from_registers = slots == 1 or (slots == 2 and v.bm < 192)  # O, which is written later then
    return {
        "Q and O": slots * _slot_bytes(v),
        "K and V": _ring_bytes(v),
        "biases and masks": _pair_bytes(v),
        "barriers of Q and O": 16 * slots,
        "barriers of K and V": 32 * v.stages,
        "work items": work * (2 * slots if from_registers else slots),
    }


def _at_launch(v: TemplateArguments) -> int:
    return equal_registers(v.threads * v.blocks_per_sm)


def _launch_registers(v: TemplateArguments) -> int:
    return min(_at_launch(v), 240)  # no more than setmaxnreg gives the consumers at most


def _spare_registers(v: TemplateArguments) -> int:
    consumers = v.bm // 64
    share = (_at_launch(v) * (consumers + 1) - 32) // consumers // 8 * 8
    return min(share, 240) - (v.bn // 2 + v.bn // 4 + v.head_dim_v // 2)


def _complaint(v: TemplateArguments, device: Device) -> str | None:
    if v.bm % 64 or v.warps != v.bm // 16 + 4:
        return "bm must be a multiple of 64, and warps bm / 16 + 4, 4 of them the producer's"
    for name in ("bn", "head_dim_v"):
        if getattr(v, name) not in WGMMA_WIDTHS:
            return f"{name} must be one of {', '.join(map(str, WGMMA_WIDTHS))} in {v.kernel}"
    if panel_columns(v.head_dim) != panel_columns(v.head_dim_v):
        return "head_dim and head_dim_v must be swizzled alike, as multiples of 64, 32 or 16"
    skipped = edges(v.score) * -(-(v.bm - 64) // v.bn)
    if skipped > v.stages and are_apart(v.score):  # it may hold a V meanwhile
        return f"a warpgroup skips {skipped} masked tiles of keys: as many stages are needed"
    if v.schedule == "Plain" and q_slots(v) == 1 and _skips_first_keys(v):
        return "Plain with one slot of Q needs rows that begin with the first keys: take General"
    if v.ping_pong and v.bm == 64:
        return "ping_pong needs two warpgroups, bm of 128 or more"
    # The system takes 1 KiB of each block on top.
    at_once = v.blocks_per_sm * (SPEC.smem_bytes(v) + 1024)
    if v.blocks_per_sm > 1 and _pair_bytes(v) and at_once > device.smem_per_sm:
        return f"{v.blocks_per_sm} blocks and their biases or masks do not fit a multiprocessor"
    return None


def _needed_registers(v: TemplateArguments) -> float:
    """Return a thread's registers at launch, for the consumers to have what they need."""
    consumers = v.bm // 64
    producer = 24 if consumers == 2 else 32
    needed = v.head_dim_v / 2 + v.bn * 3 / 4 + 28
    return (consumers * needed + producer) / (consumers + 1)


SPEC = Spec(
    name="fa3_wgmma",
    dtypes=("float16", "bfloat16"),
    shared_memory=_shared_memory,
    complaint=_complaint,
    arguments=(*NUMBERS, "ping_pong"),
    schedules=("Plain", "General"),
    schedule=_schedule,
    archs=("sm_90a",),
    tma=True,
    persistent=True,
    packs_heads=True,
    needs_keys=True,  # TMA cannot describe an array of none
    flops_per_byte=116,
    kvs=("Dense", *LENGTHS),
    is_dependent=True,
    launch_registers=_launch_registers,
    spare_registers=_spare_registers,
    tile_tables={90: _TILES},
    costs=COSTS,
    # Warps follow from bm. A single stage would have every copy waited for.
    space=Space(
        bm=(64, 128, 192),
        bn=(32, 48, 64, 80, 96, 112, 128, 144, 160, 176),
        stages=(2, 3),
        warps=(8, 12, 16),
        registers=_needed_registers,
        ping_pong=(False, True),
    ),
)
