"""Costs of tiles on a multiprocessor, and the time of a problem that follows."""

from __future__ import annotations

import math
from typing import NamedTuple

_FEW = 4
"""Row tiles of a head whose keys are counted tile by tile; for more, the average will do."""

_BRISK = 30000
"""Keys that a block visits, one tile of rows after the other, before the card's clock falls."""

_MEMORY_US = 2.0
_MEGABYTE_US = 0.222
"""Time of memory, at 4.5 TB/s, whatever the variant."""


class Work(NamedTuple):
    """The work of a problem for a variant.

    Attributes
    ----------
    waves : float
        Tiles of rows that a place for a block takes, one after the other; the average, if they are
        drawn.
    keys : tuple of float
        Tiles of keys in each place of the busiest multiprocessor: where there is one block, where
        there is a second with it, and so on.
    megabytes : float
        Megabytes of K, V, O and the rows of Q that are read: no rows of blank tiles.
    blank : float
        Tiles, a multiprocessor, none of whose rows sees a key.
    fetched : float
        Megabytes of K and V that a multiprocessor copies, tile by tile, or zeros for blank ones.
    ragged, unaligned : float
        Thousands of rows that a multiprocessor copies whose length is no multiple of 128 bytes; or
        not even of 32, box by box.
    sustained : float
        Thousands of keys that the busiest place visits when the card's clock has fallen.
    """

    waves: float
    keys: tuple[float, ...]
    megabytes: float
    blank: float
    fetched: float
    ragged: float
    unaligned: float
    sustained: float


class Cost(NamedTuple):
    """Microseconds that a variant takes for what it does.

    Attributes
    ----------
    launch : float
        For a launch, whatever it computes.
    wave : float
        For a tile of rows, in addition to its keys.
    keys : tuple of float
        For a tile of keys where one block runs on a multiprocessor; what it takes longer where two
        do; and so on.
    blank : float
        For a tile of rows that see no key.
    fetched : float
        For a megabyte of K and V, each time that it is copied.
    ragged, unaligned : float
        For a thousand rows that TMA copies in parts of lines, or of sectors.
    sustained : float
        The time that a thousand keys take longer when the clock has fallen.
    """

    launch: float
    wave: float
    keys: tuple[float, ...]
    blank: float
    fetched: float
    ragged: float
    unaligned: float
    sustained: float

    def of(self, work: Work) -> float:
        """Return the time of a problem."""
        launch, wave, keys, blank, fetched, ragged, unaligned, sustained = self
        waves, tiles, megabytes, blanks, copied, ragged_rows, unaligned_rows, later = work
        time = launch + waves * wave + blanks * blank + copied * fetched
        time += ragged_rows * ragged + unaligned_rows * unaligned + later * sustained
        if len(keys) == 1:  # most have one block a multiprocessor
            time += keys[0] * tiles[0]
        else:
            for each, number in zip(keys, tiles, strict=True):
                time += each * number
        return with_memory(time, megabytes)


def memory_us(megabytes: float) -> float:
    """Return the time in which memory moves operands."""
    return _MEMORY_US + _MEGABYTE_US * megabytes


def with_memory(time: float, megabytes: float) -> float:
    """Return the time of multiprocessors and memory, which work at the same time.

    Neither waits for all of the other: the larger counts; the smaller adds more the closer it is.
    """
    return float((time**3 + memory_us(megabytes) ** 3) ** (1 / 3))


class Copies(NamedTuple):
    """How TMA copies rows.

    Attributes
    ----------
    bytes : int
        Bytes of a row of K and one of V, in shared memory.
    ragged : bool
        Whether they are whole sectors, of 32 bytes, but no whole lines of 128.
    boxes : int
        Parts in which it copies a row, on average, where rows are no whole sectors; else 0.
    read : int
        Bytes of a row of Q, in memory.
    """

    bytes: int
    ragged: bool
    boxes: int
    read: int


def copies(head_dims: tuple[int, int], compiled: tuple[int, int]) -> Copies:
    """Return how TMA copies the rows of a problem, of 16-bit columns.

    Parameters
    ----------
    head_dims, compiled : tuple of int
        Columns of a problem's rows, which are copied to whole chunks of 16 bytes where they are
        none, and of a variant's.
    """
    size, read = 2 * sum(compiled), 2 * head_dims[0]
    chunks = [-(-columns // 8) for columns in head_dims]
    if all(n % 2 == 0 for n in chunks):
        return Copies(size, any(n % 8 for n in chunks), 0, read)
    widths = (next(n for n in (64, 32, 16) if columns % n == 0) for columns in compiled)
    parts = sum(columns // width for columns, width in zip(compiled, widths, strict=True)) // 2
    return Copies(size, False, parts, read)


def least_pairs(rows: int, keys: int, bm: int) -> float:
    """Return the pairs of a row and a key, at least, that `work` counts of a head, tile by tile.

    The head has more rows than keys and a causal mask, and tiles have `bm` rows.
    """
    unseen = (rows - keys) // bm
    seeing, first = -(-rows // bm) - unseen, keys - rows + (unseen + 1) * bm
    if seeing > _FEW:
        return bm * seeing * (first + keys) / 2
    return bm * ((seeing - 1) * (first + bm * (seeing - 2) / 2) + keys)


def work(
    heads: int,
    rows: int,
    keys: int,
    pack: int,
    causal: bool,
    megabytes: float,
    copies: Copies,
    tile: tuple[int, int, int],
    sms: int,
) -> Work:
    """Return what a problem asks of a variant.

    With a causal mask, tiles come longest first; their lengths fall evenly to that of the shortest.
    Tiles of one wave that share a multiprocessor differ. In several waves, each place draws its
    next tile when it is free, so that all have their share; but for the longest tile, which may be
    more, and for as many as there are waves, of the length that the last wave begins with.

    Parameters
    ----------
    heads, rows, keys : int
        Rows and keys of each head.
    pack : int
        Heads whose rows a tile holds together; such a tile visits all keys.
    causal : bool
    megabytes : float
        Size of all of Q, K, V and O.
    copies : Copies
    tile : tuple of int
        Its rows, its keys, and how many blocks a multiprocessor runs.
    sms : int
        Multiprocessors.
    """
    bm, bn, blocks = tile
    longest = shortest = float(-(-keys // bn))
    tiles = seeing = heads // pack * -(-rows * pack // bm)
    if causal and pack == 1:
        unseen = max(0, rows - keys) // bm
        seeing -= heads * unseen
        each = -(-rows // bm) - unseen
        if 0 < each <= _FEW:
            seen, total = keys - rows + unseen * bm, longest
            for _ in range(each - 1):
                seen += bm
                total -= -seen // bn
            shortest = min(longest, max(1.0, 2 * total / each - longest))
        else:
            # From a tile's last row to its last key, on average
            fill = (bn - math.gcd(bm, bn)) / 2
            end = keys - rows + min(rows, (unseen + 1) * bm) + fill
            shortest = min(longest, max(1.0, end / bn))
    blank = tiles - seeing
    places = sms * blocks
    waves: float = -(-tiles // places)
    average = (longest + shortest) / 2
    fall = (longest - shortest) / max(1, seeing)
    of_places: tuple[float, ...]
    if fall == 0.0:
        firsts = range(seeing, seeing - places, -sms)
        of_places = tuple(-(-max(0, left) // places) * longest for left in firsts)
    elif seeing <= places:
        firsts = range(0, places, sms)
        of_places = tuple(max(0.0, longest - fall * i) if i < seeing else 0.0 for i in firsts)
    else:
        last_wave = -(-seeing // places) - 1
        share = seeing * average / places
        last = (last_wave + 1) * (longest - fall * places * last_wave)
        of_places = (max(longest, share, last),) * blocks
        waves = max(1.0, tiles / places)
    row_bytes, is_ragged, boxes, read = copies
    visited = bn * (seeing * average + blank) / sms
    copied = 2e-3 * (tiles * bm / sms + visited) if is_ragged or boxes else 0.0
    fetched, ragged, unaligned = 1e-6 * row_bytes * visited, copied * is_ragged, copied * boxes
    megabytes -= 1e-6 * read * bm * blank
    later = max(0.0, 1e-3 * (bn * of_places[0] - _BRISK))
    return Work(waves, of_places, megabytes, blank / sms, fetched, ragged, unaligned, later)
