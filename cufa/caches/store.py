"""Storage of a cache: keys and values of all layers, lengths, tables; on the device and the host.

The host decides, and the device follows on the current stream: lengths and tables keep their
addresses, and each change is sent there. Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cufa.arrays import Array, whole_chunks
from cufa.caches.outbox import Outbox
from cufa.caches.pages import Pages, Taken
from cufa.launch.counters import is_capturing
from cufa.problem.rotary import Rotary


class Store:
    """What a cache and all views of it share.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    dtype : numpy.dtype
    layout : str
    layers : int
    shape : tuple of int
        (batch, heads_kv, capacity) or (pages, heads_kv, page_size).
    head_dims : tuple of int
        Of keys and of values.
    sequences : int
    pages : Pages or None
    rotaries : sequence of Rotary or None
        One for each layer.

    Attributes
    ----------
    k, v : array, (layers, *shape, head_dim)
        In the order of the layout. Rows are padded with zeros to whole chunks of 16 bytes.
    host : ndarray, (2, sequences) int32
        Tokens of each sequence before the newest ones, and with them.
    in_use : ndarray, (sequences,) bool
    unwritten : ndarray, (layers, sequences) bool
        Whether an `extend` was the latest that a layer's sequence has had, and no `write`.
    device, table : array
        `host` and the table of `pages` where kernels read them.
    """

    def __init__(
        self,
        xp: Any,
        dtype: np.dtype,
        layout: str,
        layers: int,
        shape: tuple[int, int, int],
        head_dims: tuple[int, int],
        sequences: int,
        pages: Pages | None,
        rotaries: Sequence[Rotary | None],
    ) -> None:
        self.xp, self.dtype, self.layout, self.layers = xp, dtype, layout, layers
        self.shape, self.head_dims, self.pages, self.rotaries = shape, head_dims, pages, rotaries
        blocks, heads, keys = shape
        ordered = shape if layout == "bhsd" else (blocks, keys, heads)
        self._bases = [
            xp.zeros((layers, *ordered, whole_chunks(d, dtype.itemsize)), dtype) for d in head_dims
        ]
        self.host = np.zeros((2, sequences), np.int32)
        # Numbers of a paged cache are in use when they have been allocated, and others always.
        self.in_use = np.full(sequences, pages is None)
        self.unwritten = np.zeros((layers, sequences), bool)
        self._place()

    def _place(self) -> None:
        """Make what follows from the other attributes: views, and memory of the device for them."""
        xp = self.xp
        self.k, self.v = (
            base[..., :d] for base, d in zip(self._bases, self.head_dims, strict=True)
        )
        starts = [address_of(base) for base in self._bases]
        self._spans = [(at, at + base.nbytes) for at, base in zip(starts, self._bases, strict=True)]
        self._outbox = Outbox()
        self.device: Array = self.host if xp is np else xp.zeros(self.host.shape, np.int32)
        self.table: Array = None
        if self.pages is not None:
            table = self.pages.table
            self.table = table if xp is np else xp.zeros(table.shape, np.int32)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self.xp is not np and is_capturing()

    def refuse_capture(self, what: str) -> None:
        """Raise an error if the current stream is being captured into a CUDA graph."""
        if self.is_capturing():
            raise RuntimeError(
                f"{what} cannot be captured into a CUDA graph, where it would do the same in each "
                "replay: call it before each replay, and capture what follows it"
            )

    def owns(self, array: Array) -> bool:
        """Whether an array is a view of keys or values."""
        address = address_of(array)
        return any(first <= address < end for first, end in self._spans)

    def copy_pages(self, plan: Sequence[Taken]) -> None:
        """Copy the pages of all layers that will no longer be shared."""
        copies = [(each.old, each.new) for each in plan if each.old is not None]
        if copies:
            old, new = self.xp.asarray(np.array([*zip(*copies, strict=True)]))
            for base in self._bases:
                base[:, new] = base[:, old]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Send what is changed of `host` and `in_use`, or leave both as they were."""
        before = self.host.copy(), self.in_use.copy()
        try:
            yield
            self.send()
        except BaseException:
            self.host[...], self.in_use[...] = before
            self.send()
            raise

    def send(self) -> None:
        """Bring the device up to what the host has decided."""
        if self.xp is np:
            return
        self._outbox.send(self.host, self.device)
        if self.pages is not None and self.pages.changed:
            table = self.pages.table
            places = np.array([row * table.shape[1] + column for row, column in self.pages.changed])
            sent = self.xp.asarray(np.stack([places, table.ravel()[places]]).astype(np.int32))
            self.table.ravel()[sent[0]] = sent[1]
            self.pages.changed.clear()


def address_of(array: Array) -> int:
    """Return where the first element of an array is."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
