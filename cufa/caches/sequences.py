"""Sequences of a cache: which they are, copies of them, and their lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.caches.counts import Counts, counts_of, integers
from cufa.caches.full import CacheFullError
from cufa.caches.layer import Layer
from cufa.caches.pages import Change
from cufa.caches.store import Store
from cufa.checks import check_size
from cufa.problem.lengths import check_lengths

_SHOWN = 16  # lengths


class Sequences:
    """Sequences of a store: all, or some that follow each other."""

    def __init__(self, store: Store, rows: slice) -> None:
        self._store, self._rows = store, rows
        # Views of what the store holds of these sequences on the host.
        self._starts, self._ends = store.host[0, rows], store.host[1, rows]
        self._in_use, self._written = store.in_use[rows], store.written[:, rows]
        self._layers: dict[int, Layer] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: the whole store of a view, too."""
        return {"_store": self._store, "_rows": self._rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another cache."""
        Sequences.__init__(self, state["_store"], state["_rows"])

    def __copy__(self) -> Sequences:
        """Return a copy that shares nothing with this cache, as `copy.deepcopy` does."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        """Say how large it is, and what is in it."""
        whole = self._store.described()
        if len(self) != self._store.in_use.size:
            whole = f"{self._numbers()} of {whole}"
        pairs = zip(self._ends.tolist(), self._in_use.tolist(), strict=True)
        lengths = [str(length) if in_use else "-" for length, in_use in pairs]
        if len(lengths) > _SHOWN:
            lengths[_SHOWN // 2 : -_SHOWN // 2] = ["..."]
        return f"{whole}: lengths {', '.join(lengths) or 'none'}"

    def _numbers(self) -> str:
        """Say which sequences they are."""
        rows = self._rows
        return f"sequences {rows.start} to {rows.stop - 1}" if len(self) else "no sequences"

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._rows.stop - self._rows.start

    @property
    def lengths(self) -> Array:
        """Tokens that each sequence has, (sequences,) int32 on the device: always the same memory.

        Do not write to it.
        """
        return self._store.device[1, self._rows]

    @property
    def host_lengths(self) -> np.ndarray:
        """The lengths on the host: a copy, known without waiting for the device."""
        return self._ends.copy()

    @property
    def block_table(self) -> Array:
        """The pages of each sequence, (sequences, pages a sequence) int32; None if not paged.

        Always the same memory on the device. Do not write to it.
        """
        return None if self._store.table is None else self._store.table[self._rows]

    def extend(self, counts: Counts) -> None:
        """Make room for new tokens of each sequence, which `write` then fills, layer by layer.

        Parameters
        ----------
        counts : int or sequence of int
            Tokens; one number is for each sequence that is in use.

        Raises
        ------
        TypeError, ValueError
            Counts that are no integers, negative, not as many as sequences, or of a sequence that
            has not been allocated; one number, and no sequence has been allocated; nothing has
            changed.
        CacheFullError
            There is not enough room; nothing has changed.
        RuntimeError
            The current stream is being captured into a CUDA graph.

        Notes
        -----
        This is what advances lengths, on the host and on the device. It stays outside of a graph:
        capture what follows it, such as `write` and `decode` of all layers, and call it before each
        replay. A replay reads lengths and tables as they are then.

        Write the tokens of each layer before the next call. A layer that misses some refuses
        `write` and `decode` until `truncate` has removed them.
        """
        self._store.refuse_capture("extend")
        self._extend(self._counts("counts", counts))

    def _extend(self, counts: np.ndarray, write: Callable[[], None] | None = None) -> None:
        """Make room for new tokens, and write them; take the room back if this fails."""
        store, first = self._store, self._rows.start
        ends = self._ends + counts
        changes: list[Change] = []
        if store.pages is None:
            capacity = store.shape[2]
            if max(ends.tolist(), default=0) > capacity:
                i = int(ends.argmax())
                raise CacheFullError(
                    f"sequence {first + i} would have {ends[i]} tokens, but the cache has a "
                    f"capacity of {capacity}"
                )
        else:
            numbers = range(first, self._rows.stop)
            grown = zip(numbers, self._ends.tolist(), ends.tolist(), strict=True)
            changes = store.pages.grown(grown)
            store.copy_pages(changes)
        with store.changing(changes):
            if store.is_captured:  # replays have written what there was
                self._written[...] = self._ends
            self._starts[...] = self._ends
            self._ends[...] = ends
            store.send()
            if write is not None:
                write()

    def truncate(self, lengths: Counts) -> None:
        """Forget the last tokens of each sequence, as when speculated ones are not accepted.

        Parameters
        ----------
        lengths : int or sequence of int
            Tokens that are kept, no more than there are; one number is for each sequence that is in
            use.

        Raises
        ------
        TypeError, ValueError
            Lengths that are no integers, negative, not as many as sequences, or more than a
            sequence has; nothing has changed.
        RuntimeError
            The current stream is being captured into a CUDA graph.
        """
        self._store.refuse_capture("truncate")
        kept = self._counts("lengths", lengths)
        bad = np.flatnonzero(kept > self._ends)
        if bad.size:
            i = int(bad[0])
            raise ValueError(
                f"lengths: {kept[i]} tokens of sequence {self._rows.start + i} cannot be kept, "
                f"which has {self._ends[i]}"
            )
        self._cut(kept)

    def reset(self) -> None:
        """Forget all tokens of these sequences: they are as when the cache was made.

        Their numbers in a paged cache are free again, as after `PagedKVCache.free`: to keep the
        numbers, use ``truncate(0)``. Keys and values stay in memory until others replace them.

        Raises
        ------
        RuntimeError
            The current stream is being captured into a CUDA graph.
        """
        self._store.refuse_capture("reset")
        with self._store.changing():
            self._in_use[...] = self._store.pages is None
            self._cut(np.zeros(len(self), np.int64))

    def _cut(self, kept: np.ndarray) -> None:
        """Keep no more tokens of each sequence than these, and no page that has none."""
        store = self._store
        with store.changing():
            store.host[:, self._rows] = np.minimum(store.host[:, self._rows], kept)
            store.send()
        self._written[...] = np.minimum(self._written, kept)
        if store.pages is not None:
            for i, length in enumerate(kept.tolist(), self._rows.start):
                store.pages.apply(store.pages.cut(i, length))

    def reorder(self, rows: Counts) -> None:
        """Let sequence i go on with the tokens of sequence ``rows[i]``, as beam search asks for.

        Parameters
        ----------
        rows : sequence of int, or ndarray of int
            One for each sequence of this cache or view, counted from its first one; on the host. A
            number may come several times, or never: then its tokens are forgotten.

        Raises
        ------
        TypeError, ValueError
            Rows that are no integers, not as many as sequences, of none of these sequences, of
            one that has not been allocated, or of one with tokens that `extend` has made room for
            and that have not been written; nothing has changed.
        RuntimeError
            The current stream is being captured into a CUDA graph.

        Notes
        -----
        Call it between steps. In a paged cache, sequences of the same tokens share their pages, as
        after `PagedKVCache.fork`; one that has not been allocated stays so. In a `KVCache`, keys
        and values are copied, layer by layer.

        Examples
        --------
        >>> import numpy as np, cufa
        >>> cache = cufa.KVCache(3, 4, 100, 64, dtype="float32")
        >>> k = v = np.ones((3, 4, 7, 64), np.float32)
        >>> _ = cache.append(k, v, counts=[7, 5, 3])
        >>> cache.reorder([2, 0, 0])
        >>> cache.host_lengths
        array([3, 7, 7], dtype=int32)
        """
        store, first = self._store, self._rows.start
        store.refuse_capture("reorder")
        chosen = integers("rows", rows)
        if chosen.shape != (len(self),):
            raise ValueError(
                f"rows has shape {chosen.shape}, but there are {len(self)} sequences: one row for "
                "each is needed"
            )
        check_lengths("rows", chosen, len(self) - 1)
        targets = np.flatnonzero(chosen != np.arange(len(self)))
        sources = chosen[targets].astype(np.int64)
        for i, source in zip(targets.tolist(), sources.tolist(), strict=True):
            idle = [first + row for row in (i, source) if not self._in_use[row]]
            if idle:
                raise ValueError(
                    f"rows[{i}] is {source}, but sequence {idle[0]} has not been allocated: "
                    f"allocate it, or give {i} in its place"
                )
        store.move(first + sources, first + targets)

    def _counts(self, name: str, counts: Counts) -> np.ndarray:
        """Return one number for each sequence."""
        return counts_of(name, counts, self._in_use, self._rows.start)

    def _layer(self, layer: int) -> Layer:
        """Return a layer of these sequences; made once."""
        held = self._layers.get(layer) if type(layer) is int else None
        if held is None:
            number = check_size("layer", layer, self._store.layers - 1, least=0)
            held = self._layers[number] = Layer(self._store, self._rows, number)
        return held
