"""KVCache: each sequence has room for a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cufa.api.options import Layout
from cufa.api.rotary import Rotary
from cufa.caches.cache import Cache
from cufa.caches.counts import check_sequence
from cufa.caches.full import CacheFullError
from cufa.caches.store import Store
from cufa.checks import check_size
from cufa.problem.problem import MAX_KEYS


class KVCache(Cache):
    """Keys and values of several sequences, each of its own length, in one array each.

    Parameters
    ----------
    sequences : int
    heads_kv : int
    capacity : int
        Tokens of a sequence at most.
    head_dim : int
        1 to 256.
    head_dim_v : int, optional
        Head dim of the values; `head_dim` by default.
    dtype : str or numpy.dtype
        "float16", "bfloat16" or "float32"; for 8 bits "fp8" (e4m3) or "int8".
    smooth : bool
        For 8 bits only: whether to subtract a mean from keys, for models whose keys have channels
        with a large mean. It is the mean of a sequence's first tokens, at most 256 tokens of the
        first `append` or `write`, in each layer and K/V head, and later tokens do not change it.
        Softmax does not change, `decode` corrects the log-sum-exp, and takes no softcap and no
        sinks.
    layers : int
        Layers of the model; they share lengths.
    layout : {"bhsd", "bshd"}
        Order of the axes, of the cache and of what is written to it.
    rotary : Rotary or list or tuple of Rotary, optional
        Turns keys, and queries that are given with them, by their position, the first being 0. A
        list has one for each layer, as Gemma 3's differ.
    xp : module
        `numpy` or `cupy`: where the cache is; with `cupy`, on the current device.

    Raises
    ------
    TypeError
        Sizes that are no integers, an unknown dtype, an `xp` or a `rotary` of another kind.
    ValueError
        Sizes, a layout or a `rotary` that do not fit; `smooth` without 8 bits.

    Notes
    -----
    A layer's keys are an array (sequences, heads_kv, capacity, head_dim) or (sequences, capacity,
    heads_kv, head_dim), as `layout` says, and its values the same with `head_dim_v`; see `layer`.

    A step of a model is `extend`, which advances the lengths, and in each layer `write` and
    `decode`. With a single layer, `append` is `extend` and `write`. Lengths are kept on the host,
    and sent to the device by calls that change them: nothing waits for the device, and storage and
    lengths stay at their addresses. So a CUDA graph of `write` and `decode` is right in each
    replay, if `extend` is called before it.

    In 8 bits, `append` and `write` take keys and values of float16, bfloat16 or float32, and
    quantize what the rotary embedding gives in float32. Each token has a float32 scale in each K/V
    head: its row's largest magnitude divided by 448 (fp8) or 127 (int8), at least 2^-126, and 1
    where all are 0; numbers are rounded to the nearest, ties to even. NaN and infinities become
    NaN; in fp8 they do not change the scale, and in int8 all of the row becomes NaN. `decode` takes
    queries of any of these dtypes on NumPy arrays, and of 16 bits on a GPU.

    Use a cache on one stream, or order the streams by events. Memory that no token has been written
    to is 0.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> rotary = cufa.Rotary.of_theta(10000.0, 64, 100)
    >>> cache = cufa.KVCache(2, 4, 100, 64, dtype="float32", rotary=rotary)
    >>> k = v = np.ones((2, 4, 7, 64), np.float32)
    >>> q = np.ones((2, 8, 7, 64), np.float32)
    >>> rotated = cache.append(k, v, q=q)
    >>> cache.decode(rotated).shape
    (2, 8, 7, 64)
    >>> cache.host_lengths
    array([7, 7], dtype=int32)
    """

    def __init__(
        self,
        sequences: int,
        heads_kv: int,
        capacity: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: Any,
        smooth: bool = False,
        layers: int = 1,
        layout: Layout = "bhsd",
        rotary: Rotary | Sequence[Rotary] | None = None,
        xp: Any = np,
    ) -> None:
        arguments = locals()
        sequences = check_size("sequences", sequences)
        capacity = check_size("capacity", capacity, MAX_KEYS)
        super().__init__(Store(arguments, sequences, capacity), slice(0, sequences))

    def fork(self, sequence: int) -> int:
        """Copy the tokens of a sequence to the first one that has none.

        A prompt that several sequences continue is computed once. For a shorter prefix, `truncate`
        the new sequence.

        Parameters
        ----------
        sequence : int

        Returns
        -------
        int
            The number of the sequence that has the copy.

        Raises
        ------
        TypeError, ValueError
            It is no integer, not one of the sequences, or has tokens that `extend` has made room
            for and that have not been written.
        CacheFullError
            All others have tokens; nothing has changed.
        RuntimeError
            The current stream is being captured into a CUDA graph.

        Notes
        -----
        The tokens are copied. `PagedKVCache` shares pages instead.
        """
        self._store.refuse_capture("fork")
        check_sequence(sequence, self._store.in_use)
        empty = np.flatnonzero(self._ends == 0)
        empty = empty[empty != sequence]
        if not empty.size:
            raise CacheFullError(
                f"all {len(self)} sequences have tokens: truncate one to 0, or make the cache of "
                "more sequences"
            )
        self._store.move(np.array([sequence]), empty[:1])
        return int(empty[0])
