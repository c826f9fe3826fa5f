"""The contents of caches as arrays: keys, values and scales of their layers."""

from __future__ import annotations

from typing import Any

from cufa.arrays import Array
from cufa.caches.kinds import dtype_of
from cufa.caches.sequences import Sequences
from cufa.checks import check_size


class Contents(Sequences):
    """Sequences whose layers can be read as arrays, for `cufa.decode` and `cufa.attention`."""

    def layer(self, layer: int = 0) -> tuple[Array, Array]:
        """Return keys and values of a layer, as `decode` takes them.

        Parameters
        ----------
        layer : int

        Returns
        -------
        k_cache, v_cache : array
            (sequences, heads_kv, capacity, head_dim), or all pages of the cache, (pages, heads_kv,
            page_size, head_dim); in the order of its layout. Always the same memory. In 8 bits,
            they are bytes that `scales` go with: float8_e4m3fn (uint8 on CuPy) or int8. The
            `decode` of the cache refuses tokens that are put there without `write`; `cufa.decode`
            takes them.

        Raises
        ------
        TypeError, ValueError
            There is no such layer.
        """
        held = self._layer(layer)
        return held.k, held.v

    def scales(self, layer: int = 0) -> tuple[Array, Array]:
        """Return the scales of a layer's keys and values, as `decode` takes them.

        Parameters
        ----------
        layer : int

        Returns
        -------
        k_scale, v_scale : array of float32, or None
            (sequences, heads_kv, capacity), or (pages, heads_kv, page_size), in the order of the
            layout: always the same memory. None where the cache has no 8 bits. Bytes times scales
            are keys without their mean where the cache is smooth. The `decode` of the cache adds
            what is lacking to the log-sum-exp, and `cufa.decode` over them does not.

        Raises
        ------
        TypeError, ValueError
            There is no such layer.
        """
        held = self._layer(layer)
        return held.k_scale, held.v_scale

    def dequantize(
        self, layer: int = 0, *, dtype: Any, length: int | None = None
    ) -> tuple[Array, Array]:
        """Return a layer's keys and values of 8 bits as arrays that `attention` takes.

        For a long prompt, `attention` over them is faster than `decode`.

        Parameters
        ----------
        layer : int
        dtype : str or numpy.dtype
            That of the queries: "float16", "bfloat16" or "float32".
        length : int, optional
            Tokens of each sequence; by default those of the longest. Numbers behind the end of a
            shorter sequence mean nothing: give ``lengths_k`` to `attention`.

        Returns
        -------
        k, v : array, (sequences, heads_kv, length, head_dim)
            In the order of the cache's layout, from pages in one piece; in new memory. Numbers are
            bytes times scales in float32, and the mean where the cache is smooth, rounded to
            `dtype`: in float16, those beyond 65504 become infinite.

        Raises
        ------
        TypeError, ValueError
            There is no such layer, the cache is not of 8 bits, a dtype or a length does not fit, or
            the layer misses tokens, as in `decode`.

        Examples
        --------
        >>> import numpy as np, cufa
        >>> cache = cufa.KVCache(1, 2, 1000, 64, dtype="int8")
        >>> q, k = np.ones((1, 4, 700, 64), np.float32), np.ones((1, 2, 700, 64), np.float32)
        >>> cache.append(k, k)
        >>> out = cufa.attention(q, *cache.dequantize(dtype=q.dtype), causal=True)
        >>> np.allclose(out, 1)
        True
        """
        held, store = self._layer(layer), self._store
        if store.kind is None:
            raise ValueError(
                f"dequantize is of caches of 8 bits, but this one is of {store.dtype.name}: "
                "layer() returns keys and values"
            )
        known = dtype_of(dtype)
        capacity = store.shape[2]
        if store.pages is not None:
            capacity *= store.pages.table.shape[1]
        longest = int(self._ends.max(initial=0))
        size = longest if length is None else check_size("length", length, capacity, least=0)
        store.check_written(layer, self._rows)
        return held.dequantized(known, size)
