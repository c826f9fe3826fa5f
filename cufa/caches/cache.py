"""The base of all caches: tokens in, attention out, for all or some of their sequences."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np

from cufa.api.decode import decode_padded
from cufa.api.options import CacheOptions, Window
from cufa.api.other_names import refuse, refuses_other_names
from cufa.arrays import AnyArray, Array, ArrayT
from cufa.caches.counts import Counts, counts_of, integers, none_allocated
from cufa.caches.full import CacheFullError
from cufa.caches.kinds import dtype_of
from cufa.caches.layer import Layer
from cufa.caches.pages import Taken
from cufa.caches.store import Store
from cufa.checks import check_scale, check_size
from cufa.features.window import NO_WINDOW
from cufa.problem.parse_decode import parse_decode
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SHOWN = 16  # lengths
_OF_PAGES = frozenset(("allocate", "free", "free_pages"))


class Cache:
    """Sequences of a `KVCache` or `PagedKVCache`: all, or some that follow each other.

    ``cache[2:5]`` is a view of sequences 2 to 4, and can do what the whole can, but for `fork`,
    `allocate` and `free`. `copy.copy`, `copy.deepcopy` and `pickle` make a cache that has memory
    of its own, with CuPy on the current device; a view takes the whole cache along. They cannot be
    captured into a CUDA graph.
    """

    def __init__(self, store: Store, rows: slice) -> None:
        self._store, self._rows = store, rows
        self._look()

    def _look(self) -> None:
        """View what the store holds of these sequences, on the host; layers when they are used."""
        store, rows = self._store, self._rows
        self._starts, self._ends = store.host[0, rows], store.host[1, rows]
        self._in_use, self._written = store.in_use[rows], store.written[:, rows]
        self._layers: dict[int, Layer] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: the whole store of a view, too."""
        return {"_store": self._store, "_rows": self._rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of another cache."""
        self.__dict__.update(state)
        self._look()

    def __copy__(self) -> Cache:
        """Return a copy that shares nothing with this cache, as `copy.deepcopy` does."""
        return copy.deepcopy(self)

    if not TYPE_CHECKING:  # where every name would be known

        def __getattr__(self, name: str) -> NoReturn:
            """Say that a method belongs to the whole cache, if a view lacks it."""
            if name == "fork" or (name in _OF_PAGES and self._store.pages is not None):
                raise AttributeError(
                    f"{name} is of the whole cache, not of a view ({self._numbers()}): call it "
                    "there, with the numbers of the whole"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
        capacity = held.k.shape[2 if store.layout == "bhsd" else 1]
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
        with self._extended(self._counts("counts", counts)):
            pass

    @contextmanager
    def _extended(self, counts: np.ndarray) -> Iterator[None]:
        """Make room for new tokens; take it back if the block fails."""
        store, first = self._store, self._rows.start
        ends = self._ends + counts
        plan: list[Taken] = []
        if store.pages is None:
            capacity = store.shape[2]
            if max(ends.tolist(), default=0) > capacity:
                i = int(ends.argmax())
                raise CacheFullError(
                    f"sequence {first + i} would have {ends[i]} tokens, but the cache has a "
                    f"capacity of {capacity}"
                )
        else:
            grown = zip(self._ends.tolist(), ends.tolist(), strict=True)
            plan = store.pages.planned([(i, *each) for i, each in enumerate(grown, first)])
            store.copy_pages(plan)
            store.pages.take(plan)
        before = self._starts.copy(), self._ends.copy(), self._written.copy()
        if store.is_captured:  # replays have written what there was
            self._written[...] = self._ends
        self._starts[...] = self._ends
        self._ends[...] = ends
        try:
            store.send()
            yield
        except BaseException:
            if store.pages is not None:
                store.pages.give_back(plan)
            self._starts[...], self._ends[...], self._written[...] = before
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
            Lengths that are no integers, negative, not as many as sequences, or more than a
            sequence has; nothing has changed.
        RuntimeError
            The current stream is being captured into a CUDA graph.
        """
        self._store.refuse_capture("truncate")
        kept = self._counts("lengths", lengths)
        store = self._store
        bad = np.flatnonzero(kept > self._ends)
        if bad.size:
            i = int(bad[0])
            raise ValueError(
                f"lengths: {kept[i]} tokens of sequence {self._rows.start + i} cannot be kept, "
                f"which has {self._ends[i]}"
            )
        with store.changing():
            store.host[:, self._rows] = np.minimum(store.host[:, self._rows], kept)
        self._written[...] = np.minimum(self._written, kept)
        if store.pages is not None:
            for i, length in enumerate(kept.tolist(), self._rows.start):
                store.pages.cut(i, length)

    def reset(self) -> None:
        """Forget all tokens of these sequences: they are as when the cache was made.

        Their numbers in a paged cache are free again, as after `PagedKVCache.free`: to keep the
        numbers, use ``truncate(0)``. Keys and values stay in memory until others replace them.

        Raises
        ------
        RuntimeError
            The current stream is being captured into a CUDA graph.
        """
        store = self._store
        store.refuse_capture("reset")
        with store.changing():
            store.host[:, self._rows] = 0
            if store.pages is not None:
                store.in_use[self._rows] = False
        self._written[...] = 0
        if store.pages is not None:
            for i in range(self._rows.start, self._rows.stop):
                store.pages.cut(i, 0)

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
        bad = np.flatnonzero((chosen < 0) | (chosen >= len(self)))
        if bad.size:
            i = int(bad[0])
            raise ValueError(f"rows[{i}] is {chosen[i]}: it must be 0 to {len(self) - 1}")
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

    # --- tokens ---

    @overload
    def append(
        self, k: AnyArray, v: AnyArray, *, q: None = None, counts: Counts | None = None
    ) -> None: ...
    @overload
    def append(
        self, k: AnyArray, v: AnyArray, *, q: ArrayT, counts: Counts | None = None
    ) -> ArrayT: ...
    def append(
        self, k: Array, v: Array, *, q: Array | None = None, counts: Counts | None = None
    ) -> Array:
        """Add tokens to each sequence of a cache of one layer: `extend`, then `write`.

        Parameters
        ----------
        k, v, q : array
            As in `write`.
        counts : int or sequence of int, optional
            As in `extend`; by default all tokens of each sequence that is in use.

        Returns
        -------
        array or None
            As in `write`.

        Raises
        ------
        TypeError, ValueError, CacheFullError, RuntimeError
            As in `extend` and `write`; nothing has changed then.
        """
        if self._store.layers != 1:
            raise ValueError(
                f"append is for a cache of one layer, and this one has {self._store.layers}: "
                "extend it, then write each layer"
            )
        self._store.refuse_capture("append, which extends the cache,")
        new = self._layer(0).new(k, v, q)
        chosen = self._counts("counts", new.seq if counts is None else counts)
        if counts is not None and chosen.max(initial=0) > new.seq:
            raise ValueError(f"counts: {chosen.max()} of {new.seq} tokens cannot be appended")
        self._store.check_written(0, self._rows)
        with self._extended(chosen):
            new.run()
            self._written[0] = self._ends
        return new.q

    @overload
    def write(self, k: AnyArray, v: AnyArray, *, q: None = None, layer: int = 0) -> None: ...
    @overload
    def write(self, k: AnyArray, v: AnyArray, *, q: ArrayT, layer: int = 0) -> ArrayT: ...
    def write(self, k: Array, v: Array, *, q: Array | None = None, layer: int = 0) -> Array:
        """Write the newest tokens, for which `extend` has made room, into one layer.

        A view that has been extended is to be written by a view of the same sequences.

        Parameters
        ----------
        k : array, shape (sequences, heads_kv, n, head_dim)
            Keys, in the dtype and layout of the cache, of the last n positions of each sequence;
            those that are not new are left out. A cache of 8 bits takes float16, bfloat16 or
            float32. Where sequences have unequal numbers of new tokens, those of each are at the
            end.
        v : array, shape (sequences, heads_kv, n, head_dim_v)
            Values.
        q : array, shape (sequences, heads_q, n, head_dim), optional
            Queries of the same tokens, in the dtype of k and the same layout.
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
            not contiguous; nothing has been written. Outside of a capture also where the layer has
            the newest tokens already, where no token is new, as without `extend`, or where the
            layer misses tokens of an `extend` before.
        CompileError
            NVRTC refused a kernel.

        Notes
        -----
        A layer is written once for each `extend`; what a replay of a graph writes does not count.

        One kernel on the current stream, which can be captured into a CUDA graph. The
        rotary embedding computes in float32 and rounds once (Su et al. 2021, RoFormer).
        """
        new = self._layer(layer).new(k, v, q)
        grown = self._ends - self._starts
        most = max(grown.tolist(), default=0)
        if most > new.seq:
            raise ValueError(f"k has shape {k.shape}, but {most} tokens are new")
        if self._store.is_capturing():  # which replays will write what, the host does not know
            new.run()
            self._store.is_captured = True
            return new.q
        written = self._written[layer]
        if (len(self) and not most) or written.tobytes() != self._starts.tobytes():
            self._refuse_written(layer, written, grown, new.seq)
        new.run()
        written[...] = self._ends
        return new.q

    def _refuse_empty(self, held: Layer, arguments: dict[str, Any]) -> None:
        """Refuse to decode where no number is allocated, or no sequence of the whole has a token.

        Errors of the arguments of `decode` come first.
        """
        caches = {"k_cache": held.k, "v_cache": held.v, "layout": self._store.layout}
        places = {"lengths": held.lengths, "block_table": held.block_table}
        places |= {"k_scale": held.k_scale, "v_scale": held.v_scale}
        parse_decode({**arguments, **caches, **places})
        if not self._in_use.any():
            raise none_allocated(self._rows.start, len(self))
        if not self._store.host[1].any():
            raise ValueError(
                "no sequence has a token to attend to: append tokens before decode, or extend the "
                "cache and write each layer"
            )

    def _refuse_written(self, layer: int, written: np.ndarray, grown: np.ndarray, n: int) -> None:
        """Refuse to write n tokens where none is new, where the new ones are, or after a gap."""
        if not self._in_use.any():
            raise none_allocated(self._rows.start, len(self))
        again = np.flatnonzero((grown > 0) & (written == self._ends))
        if again.size:
            raise ValueError(
                f"layer {layer} has the newest tokens of sequence {self._rows.start + again[0]}, "
                "which a second write would replace: call extend once before each step; to replace "
                "them, truncate the sequences, then extend them again"
            )
        before, after = self._store.host
        if n and (before == after).all():  # a view may have no part in what is new
            raise ValueError(
                f"no token is new to layer {layer}: call extend before write, with the number of "
                "new tokens"
            )
        gaps = np.flatnonzero(written < self._starts)
        if gaps.size and not self._store.is_captured:
            i = int(gaps[0])
            raise ValueError(
                f"layer {layer} holds {written[i]} tokens of sequence {self._rows.start + i}, "
                f"which had {self._starts[i]} before the last extend: write each layer after each "
                f"extend; truncate the sequence to {written[i]} to go on from there"
            )

    @overload
    def decode(
        self, q: ArrayT, *, return_lse: Literal[False] = False, **options: Unpack[CacheOptions]
    ) -> ArrayT: ...
    @overload
    def decode(
        self, q: ArrayT, *, return_lse: Literal[True], **options: Unpack[CacheOptions]
    ) -> tuple[ArrayT, ArrayT]: ...
    @overload
    def decode(
        self, q: ArrayT, *, return_lse: bool, **options: Unpack[CacheOptions]
    ) -> ArrayT | tuple[ArrayT, ArrayT]: ...
    @refuses_other_names
    def decode(
        self,
        q: Array,
        *,
        layer: int = 0,
        causal: bool = True,
        window: Window = NO_WINDOW,
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
        **other_names: Any,
    ) -> Any:
        """Attend from the newest queries to all tokens of each sequence.

        Parameters
        ----------
        q : array, shape (sequences, heads_q, n, head_dim)
            Queries of the last n positions, as `append` and `write` return them.
        layer : int
        causal, window, attention_chunk, softcap, alibi_slopes, sinks, scale, out, return_lse
            As in `cufa.decode`.
        num_splits, unified_max, kernel
            As in `cufa.decode`.

        Returns
        -------
        array, or tuple of array
            As in `cufa.decode`.

        Raises
        ------
        TypeError, ValueError, RuntimeError, CompileError
            As `cufa.decode`. ValueError also for a softcap or sinks where the cache is smooth,
            where no sequence of the whole has a token, or where the layer misses tokens that
            `extend` has made room for. The last two are not checked in a capture, and the last no
            more once a `write` has been captured, as replays write.

        Notes
        -----
        On the GPU the cache is never copied. Queries whose rows are no multiple of 16 bytes long
        are copied, and so cannot be in a CUDA graph.
        """
        if other_names:
            refuse(self.decode, other_names)
        held = self._layer(layer)
        if not np.count_nonzero(self._ends) and len(self) and not self._store.is_capturing():
            self._refuse_empty(held, locals())
        if self._written[layer].tobytes() != self._ends.tobytes():  # a fraction of comparing them
            self._store.check_written(layer, self._rows)
        if held.k_mean is not None and not (softcap is sinks is None):
            name = "sinks" if softcap is None else "softcap"
            raise ValueError(
                f"{name} must be None where the cache is smooth: scores lack what the mean of the "
                "keys adds to each; make the cache with smooth=False"
            )
        found = decode_padded(
            q,
            held.k,
            held.v,
            True,
            lengths=held.lengths,
            block_table=held.block_table,
            k_scale=held.k_scale,
            v_scale=held.v_scale,
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
        if held.k_mean is not None and return_lse:
            held.add_mean(found[1], q, check_scale(scale, q.shape[3]))
        return found
