"""The base of the kernels that decode: each team of warps has a ring of its own."""

from __future__ import annotations

import functools

from cufa.dtypes import DTYPES
from cufa.features.parts import PARTS
from cufa.specs.kv import DIVISOR, PAGES
from cufa.specs.spec import Ring, Spec
from cufa.specs.structs import TENSOR, struct
from cufa.specs.template_arguments import TemplateArguments

PARAMS = struct(
    (TENSOR, "q k v o"),
    ("u8", "lse partial lengths"),
    ("f4", "scale_log2 unified_max"),
    ("i4", "batch heads_q heads_kv seq_q seq_kv"),
    ("i4", "head_dim head_dim_v splits slack spread ends"),
    (DIVISOR, "group row_tiles units blocks parts"),
)
"""The layout of ``DecodeParams`` in ``kernels/decode_params.cuh``."""

DECODE_SCORE = tuple(part.name for part in PARTS.values() if part.decodes)
"""The parts of a score that `decode` takes."""


SMALL = ((16, 3, 12), (16, 3, 8), (16, 2, 8), (16, 1, 8), (16, 2, 4), (16, 1, 4), (16, 1, 2))
"""Shapes of rings with tiles of 16 keys, see `rings`."""

_HEAD_DIMS = (32, 64, 96, 128, 192, 256)


def padded(head_dim: int) -> int:
    """Return the head dim that is compiled."""
    return next(n for n in _HEAD_DIMS if head_dim <= n)


def team_of(bm: int) -> int:
    """Return how many warps share a ring, but for wgmma: two where tiles have over 16 rows."""
    return 2 if bm > 16 else 1


def rings(*shapes: tuple[int, int, int], team: int) -> tuple[Ring, ...]:
    """Return rings, from keys of a tile, stages and warps of each."""
    return tuple(Ring(*each, team) for each in shapes)


def partial_floats(blocks: int, rows: int, columns: int) -> int:
    """Return the float32 numbers that the pieces of `blocks` blocks take, two places each.

    ``kernels/decode_merge.cuh`` says where they are.
    """
    return 2 * blocks * rows * (columns + 4 * -(-columns // 64))


def shared_memory(
    v: TemplateArguments, team: int | None = None, scaled: bool = False
) -> dict[str, int]:
    """Return the bytes that a block holds, if `team` of its warps share a ring, or `team_of` bm.

    `scaled` is whether K and V have 8 bits and float32 scales.
    """
    team = team or team_of(v.bm)
    element, teams = DTYPES[v.dtype].bytes, v.warps // team
    keys = teams * v.stages * v.bn
    of_kv, of_scale = (1, 4) if scaled else (element, 0)
    few = max(v.bm * team // 8, 4, v.warps // -(-v.head_dim_v // 64))
    return {
        "Q": element * v.bm * v.head_dim,
        "K": keys * (of_kv * v.head_dim + of_scale),
        "V": keys * (of_kv * v.head_dim_v + of_scale),
        "O of some rows": 4 * teams * few * (v.head_dim_v + 8),
        "m and l": 4 * 2 * teams * v.bm,
    }


def complaint(v: TemplateArguments, team: int | None = None) -> str | None:
    """Say why a block cannot run, with a team as in `shared_memory`, or return None."""
    team = team or team_of(v.bm)
    if v.warps % team:
        return f"warps must be a multiple of {team}, which share a ring"
    if team > 1 and v.warps // team > 14:  # next to __syncthreads() and that of one stage
        return "each two warps of a bm of 32 or 64 need a barrier: there are 14, for 28 warps"
    if v.kv == "Paged" and v.bn > 32:
        return "a warp looks up the pages of at most 32 keys: bn must not be more with Paged"
    if v.stages < 1 or v.warps < 2:
        return "decode needs at least 1 stage and 2 warps"
    return None


spec = functools.partial(
    Spec,
    shared_memory=shared_memory,
    params=PARAMS,
    packs_heads=True,
    scores=DECODE_SCORE,
    kvs=("Contiguous", *PAGES),
    head_dim_step=32,
    decodes=True,
    is_dependent=True,
)
"""The spec of a kernel that decodes; give the rest."""
