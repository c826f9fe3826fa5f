"""The cost of decoding. Prices are bytes of K and V, as many as a multiprocessor reads meanwhile.

A work item is a sequence, a K/V head and a tile of rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cufa.device import Device
from cufa.dtypes import kv_bytes
from cufa.planner.rules import KEY_STEP
from cufa.problem.problem import Problem
from cufa.specs.decode_block import padded, partial_floats

BYTES_A_US = 34_000  # that a multiprocessor of an H200 reads while all others read
_ALONE = 2.5  # how many times as fast it reads while few others do
_WAIT = 52 << 10  # a wait for memory by a whole block: to merge, to look at lengths or pages
_END = 60 << 10  # an item's begin and end, but for its rows
_NUMBER = 27  # each number of O in that end: teams of warps add theirs up
_PIECE = 4 << 10  # one more split of an item, which has to be merged
_OVERLAP = 24
"""n blocks of whole items run on a multiprocessor where n ends take longer than to read n^2
items: some begin and end while others read, but in smaller tiles."""

_SCALE = 4  # bytes, of K or V of 8 bits for each key

_MOST_PARTIAL = 32 << 20  # bytes, which a stream keeps, see cufa/launch/scratch.py


class Items(NamedTuple):
    """The work items of a problem, all as long as can be.

    Attributes
    ----------
    number : int
    of_each : float
        Items a multiprocessor.
    keys, size : int
        Keys of one, up to the next step, and their bytes.
    end, find : int
        The prices of its begin and end, and of finding its pages: the table, then the first key.
    has_memory : bool
        Whether a block each can leave pieces, as it must where lengths differ much.
    """

    number: int
    of_each: float
    keys: int
    size: int
    end: int
    find: int
    has_memory: bool

    @classmethod
    def of(cls, problem: Problem, device: Device, bm: int) -> Items:
        """Return the items of a problem in tiles of `bm` rows."""
        rows, d, dv = problem.group * problem.seq_q, problem.head_dim, problem.head_dim_v
        number = problem.batch * problem.heads_kv * -(-rows // bm)
        keys = -(-max(1, problem.visited) // KEY_STEP) * KEY_STEP
        key = (d + dv) * kv_bytes(problem.dtype, problem.kv_dtype)
        if problem.kv_dtype is not None:
            key += 2 * _SCALE
        rows, size = min(rows, bm), keys * key
        end, find = _END + _NUMBER * rows * dv, 2 * _WAIT * (problem.kv == "Paged")
        has_memory = 4 * partial_floats(number, rows, padded(dv)) <= _MOST_PARTIAL
        return cls(number, number / device.sm_count, keys, size, end, find, has_memory)

    def are_whole(self, element_bytes: int) -> bool:
        """Whether no item is ever cut, however lengths differ.

        One multiprocessor then reads the longest sequence, while others are short, in no more time
        than cutting takes. A cut costs a merge; with several items a multiprocessor, also a look at
        all lengths and an end for each. The products of float32 halve the speed.
        """
        several = _WAIT + math.ceil(self.of_each) * self.end if self.of_each > 1 else 0
        return self.size <= 2 / element_bytes * _ALONE * (_WAIT + several)

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor if items are whole, no more than it has items."""
        most = _OVERLAP * (self.end + self.find)
        return next((n for n in (8, 4, 2) if n * n * self.size < most and n < 2 * self.of_each), 1)

    def apart(self, blocks: int) -> float:
        """Return the price where each item has a block; `blocks` of them run on a multiprocessor.

        The more waves, the more their blocks drift apart, and fill what the last leaves idle.
        """
        waves = self.of_each / blocks
        rounds = math.ceil(waves)
        read = blocks * self.size * (waves + (rounds - waves) / rounds**2)
        return read + self.end + max(0.0, waves - 1) * (self.end + _WAIT)

    def is_apart(self, blocks: int) -> bool:
        """Whether each item has a block; the others share all keys, look at lengths, and merge."""
        if self.of_each <= 1:
            return (1 - self.of_each) * self.size <= self.slack(1, 1)
        shared = self.of_each * (self.size + self.end + _WAIT) + 2 * _WAIT
        return self.has_memory and self.apart(blocks) <= shared

    @property
    def next(self) -> int:
        """The price of a further item in a share of all keys: they are not asked for ahead."""
        return self.end + _WAIT + self.find

    def slack(self, parts: int, batch: int) -> int:
        """Return how much more equal shares cost than as many equal parts of each item.

        A further item; a merge, if parts need none; a look at more lengths than a warp has lanes.
        """
        return self.next + _WAIT * ((parts == 1) + (batch > 32))

    def parts(self, blocks: int) -> int:
        """Return into how many parts `blocks` blocks cut each item: more take longer to merge."""
        return max(1, min(blocks // self.number, math.isqrt(self.size // _PIECE)))

    def expected_us(self, blocks: int | None = None) -> float:
        """Return the microseconds that `blocks` blocks take, or the least for any number."""
        read = self.of_each * self.size
        price = read + _END + math.ceil(self.of_each) * (self.end - _END)
        if blocks is not None:
            price += read * max(0.0, self.number / (self.of_each * _ALONE * blocks) - 1)
            price += _PIECE / _ALONE * (blocks // self.number)
        return price / BYTES_A_US
