"""Problem + Device -> Variant: with which rings of tiles of keys a kernel decodes."""

from __future__ import annotations

import functools

from cufa.device import Device
from cufa.dtypes import kv_bytes
from cufa.features.alibi import Alibi
from cufa.features.softcap import Softcap
from cufa.planner.decode_model import Items
from cufa.planner.residency import resident
from cufa.problem.problem import Problem
from cufa.specs import KERNELS
from cufa.specs.decode_block import padded
from cufa.specs.kv import in_cache
from cufa.specs.spec import Ring
from cufa.specs.variant import Variant

_MUCH = 512 << 10
"""Bytes that a multiprocessor reads: with fewer, the first large tile costs more than all gain."""


def tile_rows(problem: Problem, kernel: str) -> int:
    """Return the rows of a tile: each reads the keys once more, and registers hold O of all."""
    rows, sizes = problem.group * problem.seq_q, sorted(KERNELS[kernel].rings)
    if problem.head_dim_v > 128 or problem.dtype == "float32" or problem.unified_max is not None:
        return sizes[0]
    return next((bm for bm in sizes if rows <= bm), sizes[-1])


def variant_of(
    problem: Problem, device: Device, kernel: str, items: Items, fixed: bool, whole: bool
) -> Variant:
    """Return the variant of a kernel that decodes a problem; ValueError if none fits a device.

    `fixed` is whether the number of splits is, so that nothing may depend on the batch; `whole`,
    whether no item is ever cut.
    """
    bm, dims = tile_rows(problem, kernel), (padded(problem.head_dim), padded(problem.head_dim_v))
    blocks, all_rings, aligned = 1, KERNELS[kernel].rings, problem.page_size % 16 == 0
    rings, suits = all_rings[bm], bm == 16 or (whole and bm == 32)
    asked = rings[1].keys * sum(dims) * kv_bytes(problem.dtype, problem.kv_dtype)
    reads = problem.batch * problem.heads_kv * items.size / device.sm_count
    large = whole or (aligned and reads > _MUCH and not fixed)
    if whole and suits:
        blocks = items.blocks if bm == 16 else 2
    elif not fixed and bm == 16 and items.of_each > 1 and items.is_apart(2):
        blocks = 2 if items.apart(2) <= items.apart(1) else 1
    elif rings[0].team == 4:
        # To add up twice as many teams takes long; with other dims and scores registers spill.
        plain = dims == (64, 64) and not (problem.of(Softcap) or problem.of(Alibi))
        if fixed or (whole and items.size <= _MUCH) or not plain or not items.is_apart(1):
            rings = tuple(ring for ring in rings if ring.warps == 8)
    elif bm == 32 and problem.page_size % 32 == 16 and 2 * asked >= _full(device):
        rings = rings[1:]  # a tile of one page each, if two stages ask for half as much as they may
    found, kv = None, "Contiguous" if aligned else "Paged"
    while found is None and blocks:
        if suits:
            # Each team has two tiles of keys; in float32, products take longer than reading.
            more, team = 2 if blocks > 2 else 1, bm // 16
            most = items.keys * blocks // (16 * more) if whole else 64
            most = max(16, most) if large and aligned and problem.dtype != "float32" else 16
            rings = tuple(
                Ring(ring.bn, ring.stages, more * team * ring.warps, team)
                for ring in all_rings[16]
                if ring.bn <= most and (large or ring.stages > 1 or ring.warps < 8)
            )
        like = Variant(kernel, problem.dtype, *dims, bm, 16, 1, 8, blocks, kv=kv)
        found = _most_asked(like, rings, device)
        blocks //= 2
    if found is None:
        raise ValueError(f"k_cache: {device.name} cannot decode {problem.dtype}, head dims {dims}")
    kv, unified = in_cache(problem.page_size, found.bn), problem.unified_max is not None
    return found._replace(unified=unified, score=problem.score, kv=kv)


@functools.lru_cache(maxsize=4096)
def _most_asked(like: Variant, rings: tuple[Ring, ...], device: Device) -> Variant | None:
    """Return the first of the variants whose rings ask for most at a time."""
    best, most = None, 0
    element_bytes = kv_bytes(like.dtype, KERNELS[like.kernel].kv_dtype)
    key_bytes = (like.head_dim + like.head_dim_v) * element_bytes
    for ring in rings:
        warps = ring.warps // like.blocks_per_sm
        variant = like._replace(bn=ring.bn, stages=ring.stages, warps=warps)
        fits = variant.illegal(device) is None and resident(variant, device) == like.blocks_per_sm
        if most < ring.keys * key_bytes <= _full(device) and fits:
            best, most = variant, ring.keys * key_bytes
    return best


def _full(device: Device) -> int:
    """Return the bytes that all rings ask for at most: with more a multiprocessor reads slower."""
    return 1 << device.smem_per_sm.bit_length() - 1  # what shared memory holds, a power of two
