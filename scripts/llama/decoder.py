"""The step that makes a token of each sequence from the one before: on a GPU, a CUDA graph."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from models import Array

from llama.model import Llama

#: Capacities are rounded up to it, so that the next texts, a little longer, have room, too.
ROUND_TO = 256


@contextmanager
def borrowed(model: Llama, capacities: Sequence[int], page_size: int | None) -> Iterator["Decoder"]:
    """Give a decoder with an empty cache: the last one, whose step is captured, if it has room.

    Parameters
    ----------
    model : Llama
    capacities, page_size
        As in `Decoder`.
    """
    decoder, model.idle = model.idle, None
    if decoder is None or not decoder.has_room(capacities, page_size):
        decoder = None  # before another one takes memory
        rounded = [-(-capacity // ROUND_TO) * ROUND_TO for capacity in capacities]
        decoder = Decoder(model, rounded, page_size)
    decoder.cache.truncate(0)
    try:
        yield decoder
    finally:
        model.idle = decoder


class Decoder:
    """Sequences that are generated together: their cache, and the step that they take.

    Lengths and tokens are read on the device, so one graph is right for all steps: the second is
    captured, and replayed from then on. The first one compiles the kernels.

    Parameters
    ----------
    model : Llama
    capacities : sequence of int
        Tokens of each sequence at most.
    page_size : int or None
        As in `Llama.cache`.

    Attributes
    ----------
    cache : cufa.KVCache or cufa.PagedKVCache
    """

    def __init__(self, model: Llama, capacities: Sequence[int], page_size: int | None) -> None:
        self.cache = model.cache(capacities, page_size)
        self._model, self._capacities, self._page_size = model, sorted(capacities), page_size
        self._ids = model.xp.zeros((len(capacities), 1), np.int64)
        self._captures = model.xp is not np and model.is_capturable(len(capacities))
        self._steps = 0
        self._logits: Array = None
        self._graph: Any = None
        self._memory: Any = None  # of what the graph computes, as long as it may be replayed

    def has_room(self, capacities: Sequence[int], page_size: int | None) -> bool:
        """Return whether it is as good as one made of these arguments."""
        if len(capacities) != len(self._capacities) or page_size != self._page_size:
            return False
        pairs = zip(sorted(capacities), self._capacities, strict=True)
        return all(needed <= there for needed, there in pairs)

    def step(self, tokens: Array, counts: int | Sequence[int] | np.ndarray = 1) -> Array:
        """Append a token to each sequence.

        Parameters
        ----------
        tokens : array, (sequences,)
        counts : int or sequence of int
            1, or 0 for a sequence that is to stay as it is.

        Returns
        -------
        array, (sequences, vocabulary), float32
            The logits after it; of the next step, where there is a graph, in the same memory.
        """
        self.cache.extend(counts)
        self._ids[:, 0] = tokens
        if self._captures and self._steps == 1:
            self._capture()
        if self._graph is None:
            self._logits = self._compute()
        else:
            self._graph.launch()
        self._steps += 1
        return self._logits

    def _compute(self) -> Array:
        states = self._model.states(self.cache, self._ids)
        return self._model.logits(states[:, 0])

    def _capture(self) -> None:
        import cupy

        self._memory = cupy.cuda.MemoryPool()
        stream = _side_stream()
        with stream, cupy.cuda.using_allocator(self._memory.malloc):
            stream.begin_capture()
            try:
                self._logits = self._compute()
            finally:
                graph = stream.end_capture()
        self._graph = graph


@cache
def _side_stream() -> Any:
    """Return a stream to capture on, the same for all: what libraries keep for it is kept once."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)
