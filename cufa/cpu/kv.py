"""How the tiles of K and V are found: in one array, or in the pages of a cache."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class KV(Protocol):
    """Keys and values of some sequences and heads."""

    def tiles(self, keys: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V of a range of keys, (batch, heads, keys, head_dim) float32 each."""


#: Elements of K and V in 16 bits that are converted at once where several tiles of queries read
#: them: 32 MiB of float32.
_MOST_CONVERTED = 1 << 23


def as_float32(tile: np.ndarray) -> np.ndarray:
    """Return matrices as BLAS takes them, which NumPy else multiplies in slow loops."""
    *_, row_bytes, element_bytes = tile.strides
    size = tile.dtype.itemsize
    is_blas = (
        tile.dtype == np.float32
        and tile.flags.aligned
        and element_bytes == size
        and row_bytes >= tile.shape[-1] * size
        and row_bytes % size == 0
    )
    return tile if is_blas else np.ascontiguousarray(tile, dtype=np.float32)


class Dense:
    """In arrays of (batch, heads, seq, head_dim).

    Parameters
    ----------
    k, v : ndarray
    is_reused : bool
        Whether several tiles of queries read them.
    """

    def __init__(self, k: np.ndarray, v: np.ndarray, is_reused: bool = False) -> None:
        if is_reused and k.dtype != np.float32 and k.size + v.size <= _MOST_CONVERTED:
            k, v = as_float32(k), as_float32(v)
        self._k, self._v = k, v

    def tiles(self, keys: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V of a range of keys."""
        return as_float32(self._k[:, :, keys]), as_float32(self._v[:, :, keys])


class Paged:
    """One sequence in a cache of pages, (pages, heads, page_size, head_dim).

    Parameters
    ----------
    k_cache, v_cache : ndarray
    table : ndarray, (pages a sequence,)
        The sequence's pages in order; those of keys that are asked for must exist.
    """

    def __init__(self, k_cache: np.ndarray, v_cache: np.ndarray, table: np.ndarray) -> None:
        self._k, self._v, self._table = k_cache, v_cache, table

    def tiles(self, keys: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V of a range of keys; other slots of their pages are not read."""
        page, slot = np.divmod(np.arange(keys.start, keys.stop), self._k.shape[2])
        at = (self._table[page], slice(None), slot)  # gives (keys, heads, head_dim)
        k, v = (as_float32(cache[at].swapaxes(0, 1)[None]) for cache in (self._k, self._v))
        return k, v
