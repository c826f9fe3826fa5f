"""In which order a kernel computes the tiles of a problem. Integers only, no CuPy."""

from __future__ import annotations

from typing import NamedTuple

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.features.parts import is_uneven, part_named
from cufa.features.user_functions import Blocks
from cufa.problem.problem import Problem
from cufa.specs.spec import KernelSpec
from cufa.specs.variant import Variant

KEY_STEP = 16
"""Two key counts that round up to the same multiple have the same plan, as in tiles of keys."""


_FEW_TILES = 8
"""Heads with fewer tiles of keys are not interleaved: with 4, gradients took 1.01 to 1.04 times as
long."""


class Order(NamedTuple):
    """The tiles of a problem, and which follows which.

    Attributes
    ----------
    pack : int
        Query heads of one K/V head whose rows a tile holds together.
    q_tiles : int
        Row tiles of a head, or of heads whose rows are packed.
    tiles : int
        Tiles of all heads; where a block takes a whole head, one a head.
    section_heads, late_rows : int
        Heads that have their tiles interleaved, and row tiles of each head that come last: see
        ``kernels/scheduler.cuh``.
    """

    pack: int
    q_tiles: int
    tiles: int
    section_heads: int
    late_rows: int


def packable(heads_q: int, heads_kv: int, kernel: KernelSpec) -> int:
    """Return how many query heads can share a tile that has more rows than one has queries."""
    if not (kernel.packs_heads and heads_q > heads_kv > 0):
        return 1
    group = heads_q // heads_kv
    return group if 64 % group == 0 else 1  # a power of two, for TMA's boxes


def tiles_of(problem: Problem, rows: int, size: int) -> int:
    """Return how many tiles hold the rows, or keys, of a head.

    Each of several sequences that follow each other may begin in a tile's midst: see
    ``kernels/kv.cuh``.
    """
    return rows // size + problem.sequences if problem.kv == "Varlen" else -(-rows // size)


def order(problem: Problem, variant: Variant, device: Device) -> Order:
    """Return the order of a problem's tiles.

    Parameters
    ----------
    problem : Problem
    variant : Variant
    device : Device
    """
    kernel = variant.spec
    heads_q, heads_kv = problem.heads_q, problem.heads_kv
    # Each head has tiles of keys of its own where a map says which are visited.
    packs = problem.alike.seq_q < variant.bm and problem.of(Blocks) is None
    pack = packable(heads_q, heads_kv, kernel) if packs else 1
    heads = problem.batch * heads_q // pack
    q_tiles = tiles_of(problem, problem.seq_q * pack, variant.bm)
    if kernel.takes_heads:
        return Order(pack, q_tiles, heads, 1, 0)
    tiles = heads * q_tiles
    # Where tiles are of one length, those of a head follow each other.
    if not is_uneven(variant.score):
        return Order(pack, q_tiles, tiles, 1, 0)
    # About as many heads as have their K and V in half of L2 together, and in all of it with the Q
    # and O that pass through L2 while each of these heads computes one row tile. `_even` may take
    # more of them.
    row_bytes = (problem.head_dim + problem.head_dim_v) * DTYPES[problem.dtype].bytes
    if problem.precision is not None:  # 8 bits, and zeros behind the problem's columns
        row_bytes = variant.head_dim + variant.head_dim_v
    kv_bytes = max(1, -(-problem.alike.seq_kv // KEY_STEP) * KEY_STEP * row_bytes)
    passing = problem.group // pack * variant.bm * row_bytes
    fitting_kv = min(device.l2_bytes // 2 // kv_bytes, device.l2_bytes // (kv_bytes + passing))
    fitting = max(1, fitting_kv) * (problem.group // pack)
    if fitting >= heads:
        return Order(pack, q_tiles, tiles, max(1, heads), 0)
    if problem.kv == "Varlen":  # each sequence has short tiles: rank says nothing about length
        return Order(pack, q_tiles, tiles, _even(heads, fitting), 0)
    blocks = device.sm_count * variant.blocks_per_sm
    section_heads, late_rows = _sections(heads, max(1, q_tiles), blocks, fitting)
    parts = [part_named(name) for name in variant.score]
    if any(part.left_edge for part in parts) and not any(part.right_edge for part in parts):
        late_rows = 0  # the first rows see the most keys
    return Order(pack, q_tiles, tiles, section_heads, late_rows)


def falls_from_first_key(problem: Problem) -> bool:
    """Whether the first keys of a head are visited by all rows, and later ones by fewer."""
    parts = [part_named(name) for name in problem.score]
    return any(part.right_edge for part in parts) and not any(part.left_edge for part in parts)


def key_sections(problem: Problem, device: Device, bn: int, blocks_per_sm: int) -> int:
    """Return how many K/V heads have their tiles of keys interleaved, for the gradients.

    A tile for each block that runs at once is enough for the short ones of a section to fill the
    gaps that its long ones leave; more heads would share L2. Where tiles are of nearly one length,
    or a mask may hide any of them, a head's tiles follow each other; where heads have few tiles,
    too: long and short ones mix by themselves.

    Parameters
    ----------
    problem : Problem
    device : Device
    bn : int
        Keys of a tile.
    blocks_per_sm : int
        Blocks that run at once on a multiprocessor.
    """
    if not falls_from_first_key(problem) and problem.kv != "Varlen":
        return 1
    key_tiles = -(-problem.alike.seq_kv // bn)  # of a sequence, which follow each other
    if key_tiles < _FEW_TILES:
        return 1
    return _even(problem.batch * problem.heads_kv, device.sm_count * blocks_per_sm / key_tiles)


def _sections(heads: int, rows: int, blocks: int, fitting: int) -> tuple[int, int]:
    """Return the section's heads and the late rows of uneven tiles.

    Short tiles wait for memory and long ones do not, so both should run at the same time. K and V
    of a section should stay in L2, so sections are small. The short tiles of the last section fill
    the gaps that its long ones leave, so it must not be much smaller. With many tiles a head, the
    short tiles of all heads come at the end instead, and sections are half as large. The numbers
    come from trials on an H200; docs/design/fa3_wgmma.md has some.

    Parameters
    ----------
    heads : int
    rows : int
        Row tiles of a head.
    blocks : int
        Blocks that run at once.
    fitting : int
        Heads whose K and V stay in L2.
    """
    wanted = min(4.0, rows / 4) * blocks / rows  # heads
    if rows < 12:
        return _even(heads, min(fitting, wanted)), 0
    return _even(heads, min(fitting, wanted / 2)), rows // (2 if rows >= 64 else 3)


def _even(heads: int, wanted: float) -> int:
    """Return the size of sections, near what is wanted; the last one is nearly as large."""

    def uneven(size: int) -> bool:
        """Whether the last section is much smaller than the others."""
        return 4 * ((heads - 1) % size + 1) < 3 * size

    even = -(-heads // max(1, round(heads / max(1.0, wanted))))
    step = 0
    while uneven(even + step) and uneven(even - step):  # sections of one head are even
        step += 1
    return min(heads, even - step if uneven(even + step) else even + step)
