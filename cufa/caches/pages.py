"""Which page belongs to whom: the bookkeeping of a paged cache, on the host alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from cufa.caches.full import CacheFullError


class Change(NamedTuple):
    """A page of a sequence that becomes another one.

    Attributes
    ----------
    sequence, entry : int
        Its place in the table.
    old, new : int or None
        The page that was there and the one that shall be; None where there is none.
    """

    sequence: int
    entry: int
    old: int | None
    new: int | None


class Pages:
    """Pages of a cache and the tables of its sequences.

    A sequence of n tokens has the first ceil(n / page_size) entries of its row of the table. Pages
    may have several users; one that is partly filled is copied before a user of several writes.

    Parameters
    ----------
    pages : int
        Number of pages.
    page_size : int
    sequences : int
        Number of sequences, at most.
    per_sequence : int
        Pages of a sequence at most.

    Attributes
    ----------
    table : ndarray, (sequences, per_sequence) int32
        Entries that are not in use name some page, too: 0 or the last that was there.
    changed : set of (int, int)
        Entries that have changed since it was last cleared.
    """

    def __init__(self, pages: int, page_size: int, sequences: int, per_sequence: int) -> None:
        self.page_size = page_size
        self.table = np.zeros((sequences, per_sequence), np.int32)
        self.changed: set[tuple[int, int]] = set()
        self._held = [0] * sequences
        self._users = [0] * pages
        self._free = list(range(pages))[::-1]

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    def grown(self, lengths: Iterable[tuple[int, int, int]]) -> list[Change]:
        """Return what makes room for more tokens; nothing changes before it is applied.

        Parameters
        ----------
        lengths : iterable of (int, int, int)
            Sequence, tokens that it has, and tokens that it shall have.

        Returns
        -------
        list of Change
            If an old page has other users, the new one is to be a copy of it, made before tokens
            are written.

        Raises
        ------
        CacheFullError
        """
        most = self.table.shape[1] * self.page_size
        places: list[tuple[int, int, int | None]] = []
        leaving: Counter[int] = Counter()
        for sequence, length, end in lengths:
            if end > most:
                raise CacheFullError(
                    f"sequence {sequence} would have {end} tokens, but a table of "
                    f"{self.table.shape[1]} pages of {self.page_size} has room for {most}"
                )
            if end > length and length % self.page_size:
                index = length // self.page_size
                page = int(self.table[sequence, index])
                # The last user of a page that writes to it keeps it.
                if self._users[page] - leaving[page] > 1:
                    leaving[page] += 1
                    places.append((sequence, index, page))
            for index in range(self._pages_of(length), self._pages_of(end)):
                places.append((sequence, index, None))
        if len(places) > self.free:
            raise CacheFullError(
                f"out of pages: {len(places)} more are needed, but {self.free} of "
                f"{len(self._users)} are free"
            )
        free = reversed(self._free)
        return [Change(*place, new) for place, new in zip(places, free, strict=False)]

    def cut(self, sequence: int, length: int) -> list[Change]:
        """Return what takes the pages beyond a length from a sequence."""
        kept = self._pages_of(length)
        beyond = self._pages(sequence)[kept:]
        return [Change(sequence, entry, page, None) for entry, page in enumerate(beyond, kept)]

    def moved(self, sources: Sequence[int], targets: Sequence[int]) -> list[Change]:
        """Return what lets sequences use the pages that others have now."""
        return [
            Change(target, entry, old, new)
            for source, target in zip(sources, targets, strict=True)
            for entry, (old, new) in enumerate(
                zip_longest(self._pages(target), self._pages(source))
            )
        ]

    def apply(self, changes: Sequence[Change]) -> None:
        """Do what has just been planned. Pages that nobody uses any more are free."""
        for change in changes:
            if change.new is not None:
                if self._users[change.new] == 0:
                    self._free.pop()  # it is the last one
                self._users[change.new] += 1
        for sequence, entry, old, new in changes:
            if old is not None:
                self._users[old] -= 1
                if self._users[old] == 0:
                    self._free.append(old)
            self._held[sequence] += (new is not None) - (old is not None)
            if new is not None and self.table[sequence, entry] != new:
                self.table[sequence, entry] = new
                self.changed.add((sequence, entry))

    def undo(self, changes: Sequence[Change]) -> None:
        """Undo what has just been applied: pages are free in the same order as before."""
        self.apply([Change(i, entry, new, old) for i, entry, old, new in reversed(changes)])

    def _pages(self, sequence: int) -> list[int]:
        pages: list[int] = self.table[sequence, : self._held[sequence]].tolist()
        return pages

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)
