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


def _is_for_blas(matrices: np.ndarray) -> bool:
    """Whether BLAS takes matrices as they are; NumPy multiplies others in slow loops."""
    *_, row_bytes, element_bytes = matrices.strides
    size = matrices.dtype.itemsize
    return bool(
        matrices.dtype == np.float32
        and matrices.flags.aligned
        and element_bytes == size
        and row_bytes >= matrices.shape[-1] * size
        and row_bytes % size == 0
    )


def _for_blas(matrices: np.ndarray) -> np.ndarray:
    if _is_for_blas(matrices):
        return matrices
    return np.ascontiguousarray(matrices, dtype=np.float32)


class Dense:
    """Keys and values in arrays of (batch, heads, seq, head_dim).

    Parameters
    ----------
    k, v : ndarray
    is_reused : bool
        Whether several tiles of queries read them.
    """

    def __init__(self, k: np.ndarray, v: np.ndarray, is_reused: bool = False) -> None:
        if is_reused and k.dtype != np.float32 and k.size + v.size <= _MOST_CONVERTED:
            k, v = _for_blas(k), _for_blas(v)
        self._k, self._v = k, v
        self._is_ready = _is_for_blas(k) and _is_for_blas(v)

    def tiles(self, keys: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V of a range of keys."""
        if self._is_ready:
            return self._k[:, :, keys], self._v[:, :, keys]
        return _for_blas(self._k[:, :, keys]), _for_blas(self._v[:, :, keys])


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
        k, v = (_for_blas(cache[at].swapaxes(0, 1)[None]) for cache in (self._k, self._v))
        return k, v


class Scaled:
    """Keys and values of 8 bits.

    Parameters
    ----------
    values, scales : KV
        The latter's head_dim is 1.
    """

    def __init__(self, values: KV, scales: KV) -> None:
        self._values, self._scales = values, scales

    def tiles(self, keys: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V of a range of keys."""
        (k, v), (k_scale, v_scale) = self._values.tiles(keys), self._scales.tiles(keys)
        k *= k_scale  # a float32 copy
        v *= v_scale
        return k, v
