"""Storage of a cache: keys and values of all layers, lengths, tables; on the device and the host.

The host decides, and the device follows on the current stream: lengths and tables keep their
addresses, and each change is sent there. Nothing is read back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.arrays import Array, whole_chunks
from cufa.caches.pages import Pages
from cufa.launch.counters import is_capturing
from cufa.rotary import Rotary


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
    rotary : Rotary or None

    Attributes
    ----------
    k, v : array, (layers, *shape, head_dim)
        In the order of the layout. Rows are padded with zeros to whole chunks of 16 bytes.
    host : ndarray, (2, sequences) int32
        Tokens of each sequence before the newest ones, and with them.
    in_use : ndarray, (sequences,) bool
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
        rotary: Rotary | None,
    ) -> None:
        self.xp, self.dtype, self.layout, self.layers = xp, dtype, layout, layers
        self.shape, self.pages, self.rotary = shape, pages, rotary
        blocks, heads, keys = shape
        ordered = shape if layout == "bhsd" else (blocks, keys, heads)
        self._bases = [
            xp.zeros((layers, *ordered, whole_chunks(d, dtype.itemsize)), dtype) for d in head_dims
        ]
        self.k, self.v = (base[..., :d] for base, d in zip(self._bases, head_dims, strict=True))
        self.host = np.zeros((2, sequences), np.int32)
        # Numbers of a paged cache are in use when they have been allocated, and others always.
        self.in_use = np.full(sequences, pages is None)
        self.device: Array = self.host if xp is np else xp.zeros((2, sequences), np.int32)
        self.table: Array = None
        if pages is not None:
            self.table = pages.table if xp is np else xp.zeros(pages.table.shape, np.int32)

    def refuse_capture(self, what: str) -> None:
        """Raise an error if the current stream is being captured into a CUDA graph."""
        if self.xp is not np and is_capturing():
            raise RuntimeError(
                f"{what} cannot be captured into a CUDA graph, where it would do the same in each "
                "replay: call it before each replay, and capture what follows it"
            )

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy pages of all layers."""
        if copies:
            old, new = (self.xp.asarray(each) for each in zip(*copies, strict=True))
            for base in self._bases:
                base[:, new] = base[:, old]

    def send(self) -> None:
        """Bring the device up to what the host has decided."""
        if self.xp is np:
            return
        # `asarray` copies what it is given at once, and the device takes it when its turn comes.
        self.device[...] = self.xp.asarray(self.host)
        if self.pages is not None and self.pages.changed:
            rows, columns = (np.array(each) for each in zip(*self.pages.changed, strict=True))
            values = self.xp.asarray(self.pages.table[rows, columns])
            self.table[self.xp.asarray(rows), self.xp.asarray(columns)] = values
            self.pages.changed.clear()
