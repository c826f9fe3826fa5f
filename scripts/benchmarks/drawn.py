"""Problems drawn by a seed: what users may ask of a planner, common or not."""

from __future__ import annotations

import math
import random

from benchmarks.cells import Cell

Dims = tuple[tuple[int, int], ...]

MOST_OPERATIONS = 2**37
"""Operations of both products, counted without a mask."""

HEAD_DIMS = tuple(
    (d, d) for d in (32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)
)
"""Of Q and K, and of V. All are as likely; the usual ones are there more often."""


def cells(seed: int, count: int, head_dims: Dims = HEAD_DIMS) -> list[Cell]:
    """Return `count` cells, the same for a seed on any machine.

    Batches of 1 to 64, up to 128 heads of which 1 to 16 share one of K and V, and 16 to 32768
    queries and keys are drawn so that each doubling is as likely as the next, and again where they
    would need more than `MOST_OPERATIONS`.
    """
    rng = random.Random(seed)
    found: dict[Cell, None] = {}
    while len(found) < count:
        group = size(rng, 1, 16)
        heads = size(rng, 1, 128 // group)
        b, sq, sk = size(rng, 1, 64), size(rng, 16, 32768), size(rng, 16, 32768)
        dims, causal = head_dims[int(rng.random() * len(head_dims))], rng.random() < 0.5
        cell = Cell("bfloat16", b, group * heads, heads, sq, sk, *dims, causal)
        if cell._replace(causal=False).flops <= MOST_OPERATIONS:
            found[cell] = None
    return list(found)


def part_of(drawn: list[Cell], index: int, count: int) -> list[Cell]:
    """Return part `index` of `count`, from 1 on: near head dims, which run the same variants."""
    near = sorted(drawn, key=lambda cell: (cell.d, cell.causal))
    first, last = ((i * len(near)) // count for i in (index - 1, index))
    return near[first:last]


def size(rng: random.Random, least: int, most: int) -> int:
    """Return a number from `least` to `most`."""
    low, high = math.log2(least), math.log2(most + 1)
    return min(most, int(2 ** (low + (high - low) * rng.random())))
