"""Layers of a cache: the arrays that hold its tokens, as kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.arrays import Array, as_bhsd, whole_chunks
from cufa.caches.kinds import dtype_of
from cufa.caches.sequences import Sequences
from cufa.caches.store import Store
from cufa.caches.writer import Writer
from cufa.checks import check_size
from cufa.cpu import expand as cpu
from cufa.launch import expand as launch
from cufa.problem.tokens import Held, Tokens


class Layer:
    """A layer of sequences that follow each other.

    Parameters
    ----------
    store : Store
    rows : slice
        The sequences.
    number : int
        The layer.

    Attributes
    ----------
    k, v : array
        As in `Layers.layer`.
    k_scale, v_scale : array or None
        As in `Layers.scales`.
    k_mean, lengths, block_table : array or None
        As in `Tokens`, for these sequences.
    written : ndarray
        As in `Store`, for these sequences.
    writer : Writer
    """

    def __init__(self, store: Store, rows: slice, number: int) -> None:
        self._store, self._sequences = store, rows.stop - rows.start
        whole = store.k, store.v, store.k_scale, store.v_scale
        place = (number, rows) if store.pages is None else number
        self.k, self.v, *scales = (x if x is None else x[place] for x in whole)
        self.k_scale, self.v_scale = (
            x if x is None or store.layout == "bhsd" else x.swapaxes(1, 2) for x in scales
        )
        self.k_mean: Array = None if store.k_mean is None else store.k_mean[number, rows]
        starts, self.lengths = store.device[0, rows], store.device[1, rows]
        self.block_table = None if store.table is None else store.table[rows]
        self.written = store.written[number, rows]
        # The part of `Tokens` that is the same for all tokens.
        self._held = Tokens(
            *(None, None, None, None, as_bhsd(self.k, store.layout), as_bhsd(self.v, store.layout)),
            *(starts, self.lengths, self.block_table, store.rotaries[number]),
            *(*scales, self.k_mean),
        )
        self.writer = Writer(store, rows, number, self._held)

    def dequantized(self, dtype: np.dtype, length: int) -> tuple[Array, Array]:
        """Return keys and values of 8 bits as arrays of a dtype, in one piece.

        Parameters
        ----------
        dtype, length
            As in `Layers.dequantize`, checked.
        """
        store, held = self._store, self._held
        k = Held(held.k_cache, held.k_scale, self.block_table, held.k_mean)
        v = Held(held.v_cache, held.v_scale, self.block_table)
        heads, found = store.shape[1], []
        for its in (k, v):
            rows = (heads, length) if store.layout == "bhsd" else (length, heads)
            dim = its.values.shape[3]
            whole = store.xp.empty((self._sequences, *rows, whole_chunks(dim, 1)), dtype)
            out = as_bhsd(whole, store.layout)
            if store.xp is np:
                cpu.expand(its, out[..., :dim])
            else:
                launch.expand(its, out)
            found.append(whole[..., :dim])
        return found[0], found[1]

    def add_mean(self, lse: Array, q: Array, scale: float) -> None:
        """Add to log-sum-exps what the keys lack that a mean was taken off.

        Parameters
        ----------
        lse : array of float32, (batch, heads_q, seq)
        q : array
            In the order of the layout.
        scale : float
            The factor of scores.
        """
        add = cpu.add_mean if self._store.xp is np else launch.add_mean
        add(lse, as_bhsd(q, self._store.layout), self.k_mean, scale)


class Layers(Sequences):
    """Sequences, and the arrays of each layer that hold their tokens."""

    def _look(self) -> None:
        super()._look()
        self._layers: dict[int, Layer] = {}

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

    def _layer(self, layer: int) -> Layer:
        """Return a layer of these sequences; made once."""
        held = self._layers.get(layer) if type(layer) is int else None
        if held is None:
            number = check_size("layer", layer, self._store.layers - 1, least=0)
            held = self._layers[number] = Layer(self._store, self._rows, number)
        return held
