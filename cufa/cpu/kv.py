"""How the tiles of K and V are found: in one array, or in the pages of a cache."""

from __future__ import annotations

import numpy as np

#: Elements of K and V in 16 bits that are converted at once where several tiles of queries read
#: them: 32 MiB of float32.
_MOST_CONVERTED = 1 << 23


def _for_blas(matrices: np.ndarray) -> np.ndarray:
    """Return matrices as BLAS takes them; NumPy multiplies others in slow loops."""
    *_, row_bytes, element_bytes = matrices.strides
    size = matrices.dtype.itemsize
    is_ready = (
        matrices.dtype == np.float32
        and matrices.flags.aligned
        and element_bytes == size
        and row_bytes >= matrices.shape[-1] * size
        and row_bytes % size == 0
    )
    return matrices if is_ready else np.ascontiguousarray(matrices, dtype=np.float32)


class KV:
    """Keys and values of some sequences and heads.

    Parameters
    ----------
    k, v : ndarray
        (batch, heads, seq, head_dim), or all pages of a cache, (1, heads, pages, page_size,
        head_dim).
    *scales : ndarray
        Those of K and of V in 8 bits, with a head_dim of 1.
    table : ndarray, (pages a sequence,), optional
        The pages of the one sequence in order; those of keys that are asked for must exist.
    is_reused : bool
        Whether several tiles of queries read all of them.
    """

    def __init__(
        self,
        k: np.ndarray,
        v: np.ndarray,
        *scales: np.ndarray,
        table: np.ndarray | None = None,
        is_reused: bool = False,
    ) -> None:
        if is_reused and k.dtype != np.float32 and k.size + v.size <= _MOST_CONVERTED:
            k, v = _for_blas(k), _for_blas(v)
        self._k, self._v, self._scales, self._table = k, v, scales, table

    def tiles(self, keys: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V of a range of keys, (batch, heads, keys, head_dim) float32 each."""
        k, v, *scales = (_for_blas(self._rows(x, keys)) for x in (self._k, self._v, *self._scales))
        return (k * scales[0], v * scales[1]) if scales else (k, v)

    def _rows(self, x: np.ndarray, keys: slice) -> np.ndarray:
        """Return the rows of keys; other slots of their pages are not read.

        Rows out of pages are as far apart as in an array: BLAS may round by that distance.
        """
        if self._table is None:
            return x[:, :, keys]
        page, slot = np.divmod(np.arange(keys.start, keys.stop), x.shape[3])
        heads = np.arange(x.shape[1])[:, None]
        return x[0, heads, self._table[page], slot][None]
