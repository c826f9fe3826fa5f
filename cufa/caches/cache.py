"""The base of all caches: tokens in, attention out, for all or some of their sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np

from cufa.api.arguments import call_of
from cufa.api.decode import decode_padded
from cufa.api.options import Window
from cufa.api.other_names import refuse, refuses_other_names
from cufa.arrays import AnyArray, Array, ArrayT
from cufa.caches.contents import Contents
from cufa.caches.counts import Counts, not_allocated
from cufa.caches.layer import Layer
from cufa.checks import check_scale
from cufa.features.window import NO_WINDOW
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cufa.api.keywords import CacheOptions

_OF_PAGES = frozenset(("allocate", "free", "free_pages"))


class Cache(Contents):
    """Sequences of a `KVCache` or `PagedKVCache`: all, or some that follow each other.

    ``cache[2:5]`` is a view of sequences 2 to 4, and can do what the whole can, but for `fork`,
    `allocate` and `free`. `copy.copy`, `copy.deepcopy` and `pickle` make a cache that has memory
    of its own, with CuPy on the current device; a view takes the whole cache along. They cannot be
    captured into a CUDA graph.
    """

    if not TYPE_CHECKING:  # where every name would be known

        def __getattr__(self, name: str) -> NoReturn:
            """Say that a method belongs to the whole cache, if a view lacks it."""
            if name == "fork" or (name in _OF_PAGES and self._store.pages is not None):
                raise AttributeError(
                    f"{name} is of the whole cache, not of a view ({self._numbers()}): call it "
                    "there, with the numbers of the whole"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, rows: slice) -> Cache:
        """Return a view of sequences that follow each other."""
        if not isinstance(rows, slice):
            raise TypeError(f"a cache is cut by a slice, such as cache[2:5], not {rows!r}")
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"a cache is cut by a slice of step 1, not {step}")
        first = self._rows.start
        return Cache(self._store, slice(first + start, first + max(start, stop)))

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
        held = self._layer(0)
        new = held.new(k, v, q)
        chosen = self._counts("counts", new.seq if counts is None else counts)
        if counts is not None and chosen.max(initial=0) > new.seq:
            raise ValueError(f"counts: {chosen.max()} of {new.seq} tokens cannot be appended")
        self._store.check_written(0, self._rows)
        self._extend(chosen, new.run)
        held.written[...] = self._ends
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
            The queries, rotated as the keys are if the layer has a rotary embedding, in new memory;
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
        held = self._layer(layer)
        new = held.new(k, v, q)
        grown = self._ends - self._starts
        most = max(grown.tolist(), default=0)
        if most > new.seq:
            raise ValueError(f"k has shape {k.shape}, but {most} tokens are new")
        if self._store.is_capturing():  # which replays will write what, the host does not know
            new.run()
            self._store.is_captured = True
            return new.q
        if (len(self) and not most) or held.written.tobytes() != self._starts.tobytes():
            held.check_new(new.seq)
        new.run()
        held.written[...] = self._ends
        return new.q

    def _refuse_empty(self, held: Layer, arguments: dict[str, Any]) -> None:
        """Refuse to decode where no number is allocated, or no sequence of the whole has a token.

        Errors of the arguments of `decode` come first.
        """
        caches = {"k_cache": held.k, "v_cache": held.v, "layout": self._store.layout}
        places = {"lengths": held.lengths, "block_table": held.block_table}
        places |= {"k_scale": held.k_scale, "v_scale": held.v_scale}
        call_of({**arguments, **caches, **places})
        if not self._in_use.any():
            raise not_allocated(self._rows.start, len(self))
        if not self._store.host[1].any():
            raise ValueError(
                "no sequence has a token to attend to: append tokens before decode, or extend the "
                "cache and write each layer"
            )

    @overload
    def decode(self, q: ArrayT, **options: Unpack[CacheOptions[Literal[False]]]) -> ArrayT: ...
    @overload
    def decode(
        self, q: ArrayT, **options: Unpack[CacheOptions[Literal[True]]]
    ) -> tuple[ArrayT, ArrayT]: ...
    @overload
    def decode(
        self, q: ArrayT, **options: Unpack[CacheOptions[bool]]
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
        if held.written.tobytes() != self._ends.tobytes():  # a fraction of comparing them
            self._store.check_written(layer, self._rows)
        if held.k_mean is not None and not (softcap is sinks is None):
            name = "sinks" if softcap is None else "softcap"
            raise ValueError(
                f"{name} must be None where the cache is smooth: scores lack what the mean of the "
                "keys adds to each; make the cache with smooth=False"
            )
        choices = (
            *(return_lse, window, kernel, causal, attention_chunk, softcap, scale),
            *(self._store.layout, num_splits, unified_max),
        )
        scales = held.k_scale, held.v_scale
        others = held.lengths, held.block_table, *scales, alibi_slopes, sinks
        found = decode_padded(q, held.k, held.v, out, choices, others, padded=True)
        if held.k_mean is not None and return_lse:
            held.add_mean(found[1], q, check_scale(scale, q.shape[3]))
        return found
