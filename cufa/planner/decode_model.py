"""What a call of `decode` takes, by six prices: to choose the variant and the splits with.

Fitted to the 80 exact rows of docs/benchmarks/h200-decode.json: 0.935 to 1.044 of what was
measured, 0.021 in root mean square. Not used by the planner yet.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cufa.decode_problem import DecodeProblem
from cufa.device import Device
from cufa.kernel import ELEMENT_BYTES
from cufa.planner.decode_units import units_of
from cufa.variant import Variant


class Prices(NamedTuple):
    """Microseconds, but for speeds, which are bytes a microsecond."""

    begin: float = 1.79  # until keys come, and from the last result to the next launch
    row: float = 0.052  # of an item's end: a row of 128 columns, as its teams are added up
    merge: float = 0.17  # if an item has several splits
    merge_row: float = 0.011  # a row of 128 columns, each time that splits double
    second_end: float = 0.28  # of an item whose end is within a block's range
    look_up: float = 0.05  # of pages
    memory: float = 4.5e6  # all multiprocessors together
    multiprocessor: float = 34e3  # one, where others are idle


H200 = Prices()


def expected_us(
    problem: DecodeProblem, device: Device, variant: Variant, grid: int, prices: Prices = H200
) -> float:
    """Return what a call takes in blocks of a variant, all sequences being as long as can be.

    Parameters
    ----------
    problem : DecodeProblem
    device : Device
    variant : Variant
    grid : int
        Blocks: a multiple of the work items, or they have equal ranges of all keys.
    """
    items = units_of(problem, variant.bm)
    rows = min(problem.group * problem.seq_q, variant.bm) * problem.head_dim_v / 128
    columns = problem.head_dim + problem.head_dim_v
    size = items * problem.visited * columns * ELEMENT_BYTES[variant.dtype]
    speed = min(prices.memory, min(grid, device.sm_count) * prices.multiprocessor)
    us = prices.begin + size / speed + rows * prices.row
    splits = max(1.0, grid / items)
    if splits > 1:
        us += prices.merge + rows * prices.merge_row * math.log2(splits)
    if grid % items:
        us += prices.second_end
    return us + (prices.look_up if problem.is_paged else 0.0)
