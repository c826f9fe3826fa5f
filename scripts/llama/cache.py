"""Keys and values of the tokens so far, and attention over them.

The one place that knows how they are kept: `Step.attend` turns queries and keys by their positions,
appends keys and values, and attends.
"""

from itertools import groupby
from typing import Any

import numpy as np
from models import Array

import cufa
from llama.config import Config
from llama.rotary import Rotary, rotate


class Cache:
    """Keys and values of several sequences, each of its own length.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    config : Config
    dtype : numpy.dtype
    sequences : int
    capacity : int
        Tokens of the longest sequence.

    Attributes
    ----------
    lengths : ndarray, (sequences,) int64
        Tokens that each holds, on the host.
    """

    def __init__(
        self, xp: Any, config: Config, dtype: np.dtype, sequences: int, capacity: int
    ) -> None:
        self.lengths = np.zeros(sequences, np.int64)
        self._xp, self._config, self._dtype = xp, config, dtype
        self._capacity = capacity
        self._rotary = Rotary(xp, config.frequencies, capacity)
        shape = (config.layers, 2, sequences, config.kv_heads, capacity, config.head_dim)
        # Seen as (sequences, capacity, kv_heads, head_dim), kept as the kernels like it best.
        self._layers = [(k, v) for k, v in xp.empty(shape, dtype).swapaxes(3, 4)]

    def step(self, rows: slice, count: int) -> "Step":
        """Make room for `count` more tokens of each sequence of `rows`.

        Several tokens at once need sequences of one length.
        """
        starts = self.lengths[rows].copy()
        if starts.max() + count > self._capacity:
            raise ValueError(f"{starts.max() + count} tokens exceed the cache's {self._capacity}")
        if count > 1 and starts.min() != starts.max():
            raise ValueError("several tokens at once need sequences of one length")
        self.lengths[rows] += count
        return Step(self, rows, starts, count)


class Step:
    """New tokens of some sequences on their way through the layers.

    Parameters
    ----------
    cache : Cache
    rows : slice
        The sequences.
    starts : ndarray
        Tokens that each of them held before.
    count : int
        New ones of each.
    """

    def __init__(self, cache: Cache, rows: slice, starts: np.ndarray, count: int) -> None:
        self._cache, self._rows, self._count = cache, rows, count
        xp = cache._xp
        # Where the new tokens belong in a view of `rows`.
        self._places: tuple[Any, Any]
        positions: Any
        if starts.min() == starts.max():
            positions = slice(int(starts[0]), int(starts[0]) + count)
            self._places = (slice(None), positions)
            self._turns = cache._rotary.at(positions)  # the same for each sequence
        else:
            positions = xp.asarray(starts)[:, None]
            self._places = (xp.arange(len(starts))[:, None], positions)
            self._turns = cache._rotary.at(positions)
        # Sequences of one length that follow each other share a call: their range and length.
        self._runs = []
        first = 0
        for length, run in groupby(starts.tolist()):
            end = first + len(list(run))
            self._runs.append((first, end, length + count))
            first = end

    def attend(self, layer: int, qk: Array, v: Array) -> Array:
        """Append keys and values, and attend from each query to what its sequence has up to it.

        Parameters
        ----------
        layer : int
        qk : array, (rows * count, heads + kv_heads, head_dim), float32
            Queries and keys side by side, without their positions.
        v : array, (rows * count, kv_heads, head_dim), float32

        Returns
        -------
        array, (rows * count, heads * head_dim), the cache's dtype
        """
        cache, count = self._cache, self._count
        heads, dtype = cache._config.heads, cache._dtype
        qk = rotate(qk.reshape(-1, count, *qk.shape[1:]), *self._turns).astype(dtype, copy=False)
        q, k = qk[:, :, :heads], qk[:, :, heads:]
        keys, values = (held[self._rows] for held in cache._layers[layer])
        keys[self._places] = k
        values[self._places] = v.reshape(k.shape)
        causal = count > 1
        if len(self._runs) == 1:
            length = self._runs[0][2]
            attended = cufa.attention(
                q, keys[:, :length], values[:, :length], causal=causal, layout="bshd"
            )
        else:
            attended = cache._xp.empty(q.shape, dtype)
            for first, end, length in self._runs:
                cufa.attention(
                    q[first:end],
                    keys[first:end, :length],
                    values[first:end, :length],
                    causal=causal,
                    layout="bshd",
                    out=attended[first:end],
                )
        return attended.reshape(len(qk) * count, -1)
