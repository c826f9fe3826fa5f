"""What caches have in common: tokens in, attention out, for all or some of their sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from cufa.api.decode import decode_padded
from cufa.arrays import Array, as_bhsd, check_unmasked, module_of_all, overlap
from cufa.caches.full import CacheFullError
from cufa.caches.pages import Taken
from cufa.caches.store import Store
from cufa.checks import check_devices, check_dtypes
from cufa.cpu import append as cpu
from cufa.features.window import NO_WINDOW
from cufa.launch import append as launch
from cufa.problem.tokens import Tokens
from cufa.specs.variant import Variant

Counts = Any  # int, sequence of int or ndarray

_MOST = 2**31 - 1  # tokens: lengths are int32


class _Layer(NamedTuple):
    """What kernels read of a layer: views of memory that stays where it is.

    Attributes
    ----------
    k, v : array
        As of `Cache.layer`.
    k_view, v_view : array
        The same in the order (blocks, heads, keys, head_dim).
    starts, lengths, block_table : array
        As of `Tokens`.
    """

    k: Array
    v: Array
    k_view: Array
    v_view: Array
    starts: Array
    lengths: Array
    block_table: Array | None


class Cache:
    """Sequences of a `KVCache` or `PagedKVCache`: all, or some that follow each other.

    ``cache[2:5]`` is a view of sequences 2 to 4, and can do what the whole can.
    """

    def __init__(self, store: Store, rows: slice) -> None:
        self._store, self._rows = store, rows
        self._layers: dict[int, _Layer] = {}

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._rows.stop - self._rows.start

    def __getitem__(self, rows: slice) -> Cache:
        """Return a view of sequences that follow each other."""
        if not isinstance(rows, slice):
            raise TypeError(f"a cache is cut by a slice, such as cache[2:5], not {rows!r}")
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"a cache is cut by a slice of step 1, not {step}")
        first = self._rows.start
        return Cache(self._store, slice(first + start, first + max(start, stop)))

    # --- what kernels read ---

    @property
    def lengths(self) -> Array:
        """Tokens that each sequence has, (sequences,) int32 on the device: always the same memory.

        Not to be written to.
        """
        return self._store.device[1, self._rows]

    @property
    def host_lengths(self) -> np.ndarray:
        """The same on the host: a copy, known without waiting for the device."""
        return self._store.host[1, self._rows].copy()

    @property
    def block_table(self) -> Array:
        """The pages of each sequence, (sequences, pages a sequence) int32; None if not paged.

        Always the same memory on the device, not to be written to.
        """
        return None if self._store.table is None else self._store.table[self._rows]

    def layer(self, layer: int = 0) -> tuple[Array, Array]:
        """Return keys and values of a layer, as `decode` takes them.

        Parameters
        ----------
        layer : int

        Returns
        -------
        k_cache, v_cache : array
            (sequences, heads_kv, capacity, head_dim), or all pages of the cache, (pages, heads_kv,
            page_size, head_dim); in the order of its layout. Always the same memory.

        Raises
        ------
        TypeError, ValueError
            There is no such layer.
        """
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
            raise TypeError(f"layer must be an integer, not {type(layer).__name__}")
        store = self._store
        if not 0 <= layer < store.layers:
            raise ValueError(f"layer must be 0 to {store.layers - 1}, not {layer}")
        k, v = store.k[layer], store.v[layer]
        return (k, v) if store.pages is not None else (k[self._rows], v[self._rows])

    def _views(self, layer: int) -> _Layer:
        """Return what kernels read of a layer; made once."""
        found = self._layers.get(layer) if type(layer) is int else None
        if found is None:
            store = self._store
            k, v = self.layer(layer)
            found = self._layers[int(layer)] = _Layer(
                *(k, v, as_bhsd(k, store.layout), as_bhsd(v, store.layout)),
                *(store.device[0, self._rows], self.lengths, self.block_table),
            )
        return found

    # --- lengths ---

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
            has not been allocated; nothing has changed.
        CacheFullError
            There is not enough room; nothing has changed.
        RuntimeError
            The current stream is being captured into a CUDA graph.

        Notes
        -----
        This is what advances lengths, on the host and on the device. It stays outside of a graph:
        capture what follows it, such as `write` and `decode` of all layers, and call it before each
        replay. A replay reads lengths and tables as they are then.

        Write the tokens before the next call: then those that are new are others, and what has not
        been written by then stays as it is in memory.
        """
        self._store.refuse_capture("extend")
        with self._extended(self._counts("counts", counts)):
            pass

    @contextmanager
    def _extended(self, counts: np.ndarray) -> Iterator[None]:
        """Make room for new tokens, which is taken back if what follows fails."""
        store = self._store
        before = store.host[:, self._rows].copy()
        lengths = before[1].astype(np.int64)
        ends = lengths + counts
        plan: list[Taken] = []
        if store.pages is None:
            capacity = store.shape[2]
            if ends.size and ends.max() > capacity:
                i = int(ends.argmax())
                raise CacheFullError(
                    f"sequence {self._rows.start + i} would have {ends[i]} tokens, but the cache "
                    f"has a capacity of {capacity}"
                )
        else:
            numbers = range(self._rows.start, self._rows.stop)
            grown = zip(numbers, lengths.tolist(), ends.tolist(), strict=True)
            plan = store.pages.planned(list(grown))
            store.copy_pages(plan)
            store.pages.take(plan)
        store.host[0, self._rows] = lengths
        store.host[1, self._rows] = ends
        try:
            store.send()
            yield
        except BaseException:
            if store.pages is not None:
                store.pages.give_back(plan)
            store.host[:, self._rows] = before
            store.send()
            raise

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
            Lengths that are no integers, negative or not as many as sequences, or of which a
            sequence has fewer; nothing has changed.
        RuntimeError
            The current stream is being captured into a CUDA graph.
        """
        self._store.refuse_capture("truncate")
        kept = self._counts("lengths", lengths)
        store = self._store
        bad = np.flatnonzero(kept > store.host[1, self._rows])
        if bad.size:
            i = int(bad[0])
            raise ValueError(
                f"lengths: {kept[i]} tokens of sequence {self._rows.start + i} cannot be kept, "
                f"which has {store.host[1, self._rows][i]}"
            )
        with store.changing():
            store.host[:, self._rows] = np.minimum(store.host[:, self._rows], kept)
        if store.pages is not None:
            for i, length in enumerate(kept.tolist(), self._rows.start):
                store.pages.cut(i, length)

    def _counts(self, name: str, counts: Counts) -> np.ndarray:
        """Return one number for each sequence."""
        check_unmasked(name, counts)
        try:
            array = np.asarray(counts)
        except (TypeError, ValueError):  # a CuPy array, or lists of unequal lengths
            raise TypeError(
                f"{name} must be an integer or as many as sequences, on the host, not "
                f"{type(counts).__name__}"
            ) from None
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"{name} must be integers, not {array.dtype.name}")
        if array.ndim and array.shape != (len(self),):
            raise ValueError(f"{name} has shape {array.shape}, but there are {len(self)} sequences")
        if array.size and array.min() < 0:
            raise ValueError(f"{name} must not be negative, but {array.min()} is")
        if array.size and array.max() > _MOST:
            raise ValueError(f"{name} must not be more than {_MOST}, but {array.max()} is")
        in_use = self._store.in_use[self._rows]
        if array.ndim == 0:
            return np.where(in_use, array, 0).astype(np.int64)
        idle = np.flatnonzero((array > 0) & ~in_use)
        if idle.size:
            raise ValueError(
                f"{name}: sequence {self._rows.start + int(idle[0])} has not been allocated"
            )
        return array.astype(np.int64)

    # --- tokens ---

    def append(
        self, k: Array, v: Array, q: Array | None = None, *, counts: Counts | None = None
    ) -> Array:
        """Add tokens to each sequence of a cache of one layer: `extend`, then `write`.

        Parameters
        ----------
        k, v, q : array
            As of `write`.
        counts : int or sequence of int, optional
            As of `extend`; by default all tokens of each sequence that is in use.

        Returns
        -------
        array or None
            As of `write`.

        Raises
        ------
        TypeError, ValueError, CacheFullError, RuntimeError
            As of both; nothing has changed then.
        """
        if self._store.layers != 1:
            raise ValueError(
                f"append is for a cache of one layer, and this one has {self._store.layers}: "
                "extend it, then write each layer"
            )
        self._store.refuse_capture("append, which extends the cache,")
        tokens, turned_q = self._tokens(k, v, q, 0)
        seq = tokens.k.shape[2]
        chosen = self._counts("counts", seq if counts is None else counts)
        if chosen.size and chosen.max() > seq:
            raise ValueError(f"counts: {chosen.max()} of {seq} tokens cannot be appended")
        with self._extended(chosen):
            self._run(tokens)
        return turned_q

    def write(self, k: Array, v: Array, q: Array | None = None, *, layer: int = 0) -> Array:
        """Write the newest tokens, for which `extend` has made room, into one layer.

        A view that has been extended is to be written by a view of the same sequences.

        Parameters
        ----------
        k : array, shape (sequences, heads_kv, n, head_dim)
            Keys, in the dtype and layout of the cache, of the last n positions of each sequence;
            those that are not new are left out. So of a batch of which sequences have unequally
            many new tokens, each has its own at the end.
        v : array, shape (sequences, heads_kv, n, head_dim_v)
            Values.
        q : array, shape (sequences, heads_q, n, head_dim), optional
            Queries of the same tokens, in the same dtype and layout.
        layer : int

        Returns
        -------
        array or None
            The queries, turned as the keys are if the layer has a rotary embedding, in new memory;
            else `q` itself.

        Raises
        ------
        TypeError, ValueError
            Arrays that do not fit, or that would be copied in a capture because their last axis is
            not contiguous; nothing has been written.
        CompileError
            NVRTC refused a kernel.

        Notes
        -----
        One kernel on the current stream, which can be captured into a CUDA graph. What a rotary
        embedding turns is computed in float32 and rounded once (Su et al. 2021, RoFormer).
        """
        tokens, turned_q = self._tokens(k, v, q, layer)
        host = self._store.host[:, self._rows]
        new = int((host[1] - host[0]).max(initial=0))
        if new > tokens.k.shape[2]:
            raise ValueError(f"k has shape {k.shape}, but {new} tokens are new")
        self._run(tokens)
        return turned_q

    def decode(
        self,
        q: Array,
        *,
        layer: int = 0,
        causal: bool = True,
        window: tuple[int | None, int | None] = NO_WINDOW,
        attention_chunk: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        scale: float | None = None,
        out: Array | None = None,
        return_lse: bool = False,
        num_splits: int | None = None,
        unified_max: float | None = None,
        kernel: str | Variant | None = None,
    ) -> Any:
        """Attend from the newest queries to all tokens of each sequence.

        Parameters
        ----------
        q : array, shape (sequences, heads_q, n, head_dim)
            Queries of the last n positions, as `append` and `write` return them.
        layer : int
        causal, window, attention_chunk, softcap, alibi_slopes, sinks, scale, out, return_lse
            As of `cufa.decode`.
        num_splits, unified_max, kernel
            As of `cufa.decode`.

        Returns
        -------
        array, or tuple of array
            As of `cufa.decode`.

        Raises
        ------
        TypeError, ValueError, RuntimeError, CompileError
            As `cufa.decode`.

        Notes
        -----
        On the GPU the cache is never copied. Queries are, and so cannot be in a CUDA graph, whose
        rows are no multiple of 16 bytes long.
        """
        views = self._views(layer)
        return decode_padded(
            q,
            views.k,
            views.v,
            True,
            lengths=views.lengths,
            block_table=views.block_table,
            causal=causal,
            window=window,
            attention_chunk=attention_chunk,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            scale=scale,
            layout=self._store.layout,
            out=out,
            return_lse=return_lse,
            num_splits=num_splits,
            unified_max=unified_max,
            kernel=kernel,
        )

    def _tokens(
        self, k: Array, v: Array, q: Array | None, layer: int
    ) -> tuple[Tokens, Array | None]:
        """Check new tokens; return them as views, and the queries that a call returns."""
        store = self._store
        _, _, k_cache, v_cache, starts, lengths, block_table = self._views(layer)
        arrays = {"k": k, "v": v, **({} if q is None else {"q": q})}
        xp = module_of_all({**arrays, "the cache": store.k})
        if xp is np:
            arrays = {name: np.asarray(array) for name, array in arrays.items()}
        check_dtypes({"the cache": store.k, **arrays})
        views = {}
        for name, array in arrays.items():
            if array.ndim != 4:
                raise ValueError(f"{name} has shape {array.shape}: 4 axes are needed")
            views[name] = as_bhsd(array, store.layout)
        seq = views["k"].shape[2]
        for name, view in views.items():
            dim = (v_cache if name == "v" else k_cache).shape[3]
            heads = view.shape[1] if name == "q" else store.shape[1]
            needed = (len(self), heads, seq, dim)
            if view.shape != needed:
                axes = needed if store.layout == "bhsd" else (needed[0], seq, heads, dim)
                raise ValueError(
                    f"{name} has shape {arrays[name].shape}, but {axes} is needed (k "
                    f"{arrays['k'].shape}, {len(self)} sequences)"
                )
            if store.owns(view) and (overlap(view, k_cache) or overlap(view, v_cache)):
                raise ValueError(
                    f"{name} (shape {arrays[name].shape}) shares memory with the cache, where it "
                    "would change while it is read: give a copy"
                )
        if q is not None and views["q"].shape[1] % store.shape[1]:
            raise ValueError(
                f"q has shape {arrays['q'].shape}: heads {views['q'].shape[1]} is no multiple of "
                f"the cache's {store.shape[1]}"
            )
        if xp is not np:
            check_devices({**arrays, "the cache": store.k}, xp)
        result, turned_q = q, None
        rotary = store.rotaries[layer]
        if q is not None and rotary is not None:
            result = xp.empty(q.shape, q.dtype)
            turned_q = as_bhsd(result, store.layout)
        tokens = Tokens(
            k=views["k"],
            v=views["v"],
            q=views.get("q"),
            turned_q=turned_q,
            k_cache=k_cache,
            v_cache=v_cache,
            starts=starts,
            lengths=lengths,
            block_table=block_table,
            rotary=rotary,
        )
        return tokens, result

    def _run(self, tokens: Tokens) -> None:
        if self._store.xp is np:
            cpu.append(tokens)
        else:
            launch.append(tokens)
