"""A layer of a cache: the arrays that hold its tokens, and new tokens on their way into them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Array, as_bhsd, module_of_all, overlap, whole_chunks
from cufa.caches.counts import not_allocated
from cufa.caches.store import Store
from cufa.checks import check_devices, check_dtypes
from cufa.cpu import append as cpu
from cufa.cpu import expand as cpu_expand
from cufa.launch import append as launch
from cufa.launch import expand as launch_expand
from cufa.launch.launch import Launch
from cufa.launch.signature import Key
from cufa.problem.tokens import Held, Tokens
from cufa.remembered import remember

_KINDS = 64  # of tokens that are remembered


class NewTokens(NamedTuple):
    """Tokens that have been checked: nothing but writing them is left.

    Attributes
    ----------
    run : callable
        Writes them on the current stream.
    seq : int
        Tokens of each sequence that there are arrays of.
    q : array or None
        The queries that the caller gets: turned when `run` has run.
    kept : tuple
        Arrays that `run` knows by their addresses alone.
    """

    run: Callable[[], None]
    seq: int
    q: Array | None
    kept: tuple[Array, ...] = ()


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
        As in `Cache.layer`.
    k_scale, v_scale : array or None
        As in `Cache.scales`.
    k_mean, lengths, block_table : array or None
        As in `Tokens`, for these sequences.
    written : ndarray
        As in `Store`, for these sequences.
    """

    def __init__(self, store: Store, rows: slice, number: int) -> None:
        self._store, self._rows, self._number = store, rows, number
        self._sequences = rows.stop - rows.start
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
        self._expand: Any = cpu_expand if store.xp is np else launch_expand
        self._own = [x for x in (self.k, self.v, *scales) if x is not None]
        self._addresses = () if store.xp is np else launch.addresses(self._held)[4:]
        self._launches: dict[Key | None, Launch] = {}

    def new(self, k: Array, v: Array, q: Array | None) -> NewTokens:
        """Check new tokens. Nothing is written.

        Parameters
        ----------
        k, v, q : array
            As in `Cache.write`.

        Raises
        ------
        TypeError, ValueError, CompileError
            As in `Cache.write`.
        """
        store, held = self._store, self._held
        kind = None if store.xp is np else launch.kind_of(k, v, q)
        known = self._launches.get(kind)
        if known is None:
            k, v, q = self._checked(k, v, q)
        else:
            self._refuse_own(k, v, q)
        turned_q, result = None, q
        if q is not None and held.rotary is not None:
            turned_q = result = store.xp.empty(q.shape, q.dtype)
        seq = k.shape[2 if store.layout == "bhsd" else 1]
        if known is None:
            arrays = {"k": k, "v": v, "q": q, "turned_q": turned_q}
            tokens = held._replace(
                **{n: x if x is None else as_bhsd(x, store.layout) for n, x in arrays.items()}
            )
            if store.xp is np or not k.size:
                append = cpu.append if store.xp is np else launch.append
                return NewTokens(partial(append, tokens), seq, result)
            known, kind = launch.prepared(tokens), launch.kind_of(k, v, q)
            if kind is not None:
                remember(self._launches, kind, known, _KINDS)
        q_at, turned_at = 0, 0
        if q is not None and turned_q is not None:
            q_at, turned_at = q.data.ptr, turned_q.data.ptr
        run = partial(known, k.data.ptr, v.data.ptr, q_at, turned_at, *self._addresses)
        return NewTokens(run, seq, result, (k, v, q))

    def check_new(self, n: int) -> None:
        """Refuse to write n tokens where none is new, where the new ones are, or after a gap."""
        store, layer, first = self._store, self._number, self._rows.start
        (starts, ends), written = store.host[:, self._rows], self.written
        if not store.in_use[self._rows].any():
            raise not_allocated(first, self._sequences)
        again = np.flatnonzero((ends > starts) & (written == ends))
        if again.size:
            raise ValueError(
                f"layer {layer} has the newest tokens of sequence {first + again[0]}, which a "
                "second write would replace: call extend once before each step; to replace them, "
                "truncate the sequences, then extend them again"
            )
        if n and (store.host[0] == store.host[1]).all():  # a view may have no part in what is new
            raise ValueError(
                f"no token is new to layer {layer}: call extend before write, with the number of "
                "new tokens"
            )
        gaps = np.flatnonzero(written < starts)
        if gaps.size and not store.is_captured:
            i = int(gaps[0])
            raise ValueError(
                f"layer {layer} holds {written[i]} tokens of sequence {first + i}, which had "
                f"{starts[i]} before the last extend: write each layer after each extend; truncate "
                f"the sequence to {written[i]} to go on from there"
            )

    def _checked(self, k: Array, v: Array, q: Array | None) -> tuple[Array, Array, Array | None]:
        """Check tokens; return the arrays, or copies where a kernel cannot read them."""
        store, held = self._store, self._held
        xp = store.xp
        arrays = {"k": k, "v": v, **({} if q is None else {"q": q})}
        module_of_all({"the cache": store.k, **arrays})
        if xp is np:
            arrays = {name: np.asarray(array) for name, array in arrays.items()}
        check_dtypes(arrays if store.kind else {"the cache": store.k, **arrays})
        for name, array in arrays.items():
            if array.ndim != 4:
                raise ValueError(f"{name} has shape {array.shape}: 4 axes are needed")
        views = {name: as_bhsd(array, store.layout) for name, array in arrays.items()}
        seq, heads_kv = views["k"].shape[2], store.shape[1]
        for name, view in views.items():
            dim = (held.v_cache if name == "v" else held.k_cache).shape[3]
            heads = view.shape[1] if name == "q" else heads_kv
            needed = (self._sequences, heads, seq, dim)
            if view.shape != needed:
                axes = needed if store.layout == "bhsd" else (needed[0], seq, heads, dim)
                raise ValueError(
                    f"{name} has shape {arrays[name].shape}, but {axes} is needed (k "
                    f"{arrays['k'].shape}, {self._sequences} sequences, layout {store.layout!r})"
                )
        if q is not None and views["q"].shape[1] % heads_kv:
            raise ValueError(
                f"q has shape {arrays['q'].shape}: heads {views['q'].shape[1]} is no multiple of "
                f"the cache's {heads_kv}"
            )
        self._refuse_own(arrays["k"], arrays["v"], arrays.get("q"))
        if xp is not np:
            check_devices({**arrays, "the cache": store.k}, xp)
            arrays = {name: launch.in_rows(name, array) for name, array in arrays.items()}
        return arrays["k"], arrays["v"], arrays.get("q")

    def _refuse_own(self, k: Array, v: Array, q: Array | None) -> None:
        """Refuse views of the cache itself."""
        for name, array in (("k", k), ("v", v), ("q", q)):
            if array is None or not self._store.owns(array):
                continue
            if any(overlap(array, own) for own in self._own):
                raise ValueError(
                    f"{name} (shape {array.shape}) shares memory with the cache, where it would "
                    "change while it is read: give a copy"
                )

    def dequantized(self, dtype: np.dtype, length: int) -> tuple[Array, Array]:
        """Return keys and values of 8 bits as arrays of a dtype, in one piece.

        Parameters
        ----------
        dtype, length
            As in `Cache.dequantize`, checked.
        """
        store, held = self._store, self._held
        k = Held(held.k_cache, held.k_scale, self.block_table, held.k_mean)
        v = Held(held.v_cache, held.v_scale, self.block_table)
        heads, found = store.shape[1], []
        for its in (k, v):
            rows = (heads, length) if store.layout == "bhsd" else (length, heads)
            dim = its.values.shape[3]
            whole = store.xp.empty((self._sequences, *rows, whole_chunks(dim, 1)), dtype)
            found.append(whole[..., :dim])
            self._expand.expand(its, as_bhsd(found[-1], store.layout))
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
        self._expand.add_mean(lse, as_bhsd(q, self._store.layout), self.k_mean, scale)
