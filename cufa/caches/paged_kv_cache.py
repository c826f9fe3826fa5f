"""PagedKVCache: sequences take pages as they grow, and may share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cufa.api.options import Layout
from cufa.api.rotary import Rotary
from cufa.caches.cache import Cache
from cufa.caches.counts import check_sequence
from cufa.caches.full import CacheFullError
from cufa.caches.pages import Pages
from cufa.caches.store import Store
from cufa.checks import check_size
from cufa.problem.problem import MAX_KEYS


class PagedKVCache(Cache):
    """Keys and values of sequences that come and go, in pages of a common store.

    Parameters
    ----------
    pages : int
        Number of pages.
    page_size : int
        Tokens of a page: any number.
    sequences : int
        Sequences at the same time, at most; they have numbers from 0 on.
    heads_kv : int
    head_dim : int
    pages_per_sequence : int, optional
        Pages of a sequence at most, the width of the block table; `pages` by default. A sequence
        has room for `page_size` tokens a page.
    head_dim_v, dtype, smooth, layers, layout, rotary, xp
        As in `KVCache`.

    Raises
    ------
    TypeError, ValueError
        As in `KVCache`.

    Notes
    -----
    A layer's keys are an array (pages, heads_kv, page_size, head_dim) or (pages, page_size,
    heads_kv, head_dim), as `layout` says, and its values the same with `head_dim_v`; see `layer`
    and `block_table`. Lengths and CUDA graphs are as in `KVCache`.

    Numbers that are not allocated have the length 0: their rows are not written, and decode to 0.
    So a batch is always all numbers, or a range of them, and one CUDA graph serves whoever is in
    it. A batch without an allocated number is refused, except in a capture.

    `fork` shares a sequence's pages with another one. A page that is partly filled and has several
    users is copied when one of them grows (copy on write); others never are. Pages are those of
    PagedAttention (Kwon et al. 2023).

    Examples
    --------
    >>> import numpy as np, cufa
    >>> cache = cufa.PagedKVCache(10, 16, 2, 4, 64, dtype="float32")
    >>> first = cache.allocate()
    >>> k = v = np.ones((1, 4, 20, 64), np.float32)
    >>> cache[:1].append(k, v)
    >>> second = cache.fork(first)
    >>> cache.free_pages, cache.host_lengths.tolist()
    (8, [20, 20])
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        sequences: int,
        heads_kv: int,
        head_dim: int,
        *,
        pages_per_sequence: int | None = None,
        head_dim_v: int | None = None,
        dtype: Any,
        smooth: bool = False,
        layers: int = 1,
        layout: Layout = "bhsd",
        rotary: Rotary | Sequence[Rotary] | None = None,
        xp: Any = np,
    ) -> None:
        arguments = locals()
        width = pages if pages_per_sequence is None else pages_per_sequence
        pages = check_size("pages", pages)
        page_size = check_size("page_size", page_size)
        sequences = check_size("sequences", sequences)
        width = check_size("pages_per_sequence", width)
        capacity = check_size("pages_per_sequence * page_size", width * page_size, MAX_KEYS)
        tables = Pages(pages, page_size, sequences, width)
        super().__init__(Store(arguments, sequences, capacity, tables), slice(0, sequences))

    @property
    def free_pages(self) -> int:
        """Pages that no sequence uses."""
        assert self._store.pages is not None
        return self._store.pages.free

    def allocate(self) -> int:
        """Take the lowest free number for a new, empty sequence.

        Returns
        -------
        int

        Raises
        ------
        CacheFullError
            All are in use; nothing has changed.
        """
        in_use = self._store.in_use
        free = np.flatnonzero(~in_use)
        if free.size == 0:
            raise CacheFullError(f"all {in_use.size} sequences are in use")
        sequence = int(free[0])
        in_use[sequence] = True
        return sequence

    def free(self, sequence: int) -> None:
        """Forget a sequence: its number and the pages that no other one uses are free.

        Parameters
        ----------
        sequence : int

        Raises
        ------
        TypeError, ValueError
            It is no integer, or has not been allocated.
        RuntimeError
            The current stream is being captured into a CUDA graph.
        """
        self._store.refuse_capture("free")
        first = check_sequence(sequence, self._store.in_use)
        self[first : first + 1].reset()

    def fork(self, sequence: int) -> int:
        """Make a new sequence that has the same tokens, in the same pages.

        For a shorter prefix, `truncate` the new sequence.

        Parameters
        ----------
        sequence : int

        Returns
        -------
        int
            The number of the new sequence.

        Raises
        ------
        TypeError, ValueError
            It is no integer, has not been allocated, or has tokens that `extend` has made room for
            and that have not been written; nothing has changed.
        CacheFullError
            All numbers are in use; nothing has changed.
        RuntimeError
            The current stream is being captured into a CUDA graph.
        """
        self._store.refuse_capture("fork")
        check_sequence(sequence, self._store.in_use)
        with self._store.changing():
            new = self.allocate()
            self._store.move(np.array([sequence]), np.array([new]))
        return new
