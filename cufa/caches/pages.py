"""Which page belongs to whom: the bookkeeping of a paged cache, on the host alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cufa.caches.full import CacheFullError


class Taken(NamedTuple):
    """A free page that a sequence takes.

    Attributes
    ----------
    sequence, entry : int
        Its place in the table.
    old : int or None
        The page that was there and has other users: the new page is to be a copy of it.
    new : int
    """

    sequence: int
    entry: int
    old: int | None
    new: int


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

    def planned(self, grown: Sequence[tuple[int, int, int]]) -> list[Taken]:
        """Plan room for more tokens; nothing changes before it is taken.

        Parameters
        ----------
        grown : sequence of (int, int, int)
            Sequence, tokens that it has, and tokens that it shall have.

        Returns
        -------
        list of Taken
            Pages that are to be copied and taken before the tokens are written.

        Raises
        ------
        CacheFullError
        """
        most = self.table.shape[1] * self.page_size
        places: list[tuple[int, int, int | None]] = []
        leaving: Counter[int] = Counter()
        for sequence, length, end in grown:
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
        return [
            Taken(*place, new) for place, new in zip(places, reversed(self._free), strict=False)
        ]

    def take(self, plan: Sequence[Taken]) -> None:
        """Do what has just been planned."""
        for sequence, index, old, new in plan:
            self._free.pop()
            if old is None:
                self._held[sequence] = index + 1
            else:
                self._users[old] -= 1
            self._users[new] = 1
            self._set(sequence, index, new)

    def give_back(self, plan: Sequence[Taken]) -> None:
        """Undo what has just been taken."""
        for sequence, index, old, new in reversed(plan):
            self._free.append(new)
            self._users[new] = 0
            if old is None:
                self._held[sequence] = index
            else:
                self._users[old] += 1
                self._set(sequence, index, old)

    def cut(self, sequence: int, length: int) -> None:
        """Give back the pages beyond a length."""
        kept = self._pages_of(length)
        self._drop(self._pages(sequence)[kept:])
        self._held[sequence] = min(kept, self._held[sequence])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Let sequences use the pages that others have now.

        Returns
        -------
        list of (int, list of int)
            The pages that each target had, for `move_back` or `release`.
        """
        held = [self._pages(source) for source in sources]
        before = [(target, self._pages(target)) for target in targets]
        for target, pages in zip(targets, held, strict=True):
            for page in pages:
                self._users[page] += 1
            self._fill(target, pages)
        return before

    def move_back(self, before: Sequence[tuple[int, list[int]]]) -> None:
        """Undo what `move` has done."""
        for target, pages in before:
            self._drop(self._pages(target))  # which others use, too
            self._fill(target, pages)

    def release(self, before: Sequence[tuple[int, list[int]]]) -> None:
        """Give back what sequences had before they were moved."""
        for _, pages in before:
            self._drop(pages)

    def _pages(self, sequence: int) -> list[int]:
        pages: list[int] = self.table[sequence, : self._held[sequence]].tolist()
        return pages

    def _fill(self, sequence: int, pages: Sequence[int]) -> None:
        for index, page in enumerate(pages):
            self._set(sequence, index, page)
        self._held[sequence] = len(pages)

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _set(self, sequence: int, index: int, page: int) -> None:
        if self.table[sequence, index] != page:
            self.table[sequence, index] = page
            self.changed.add((sequence, index))
