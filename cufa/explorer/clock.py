"""Clocks of calls on a GPU: bursts of calls between CUDA events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

Call = Callable[[], Any]
"""Queues one call of a contestant on the current stream and returns its result."""

Reading = Callable[[], float]
"""Waits for a burst that was queued and returns its milliseconds a call."""

REST_S = 0.02
"""A pause between rounds that keeps a card below its power limit."""


class Clock(Protocol):
    """The device, as a race needs it."""

    def burst(self, call: Call, calls: int) -> Reading:
        """Queue `calls` calls between two time stamps."""

    def rest(self) -> None:
        """Let the device cool between two rounds."""


class CudaClock:
    """CUDA events on CuPy's current stream.

    Before each burst a buffer larger than the L2 cache is written: every contestant then starts
    with the same cold cache, and the host is some calls ahead when the burst begins.

    Parameters
    ----------
    rest_s : float
        Pause between rounds, which keeps the card below its power limit.
    flush_bytes : int
        Size of that buffer.
    every_call : bool
        Whether to write it before every call of a burst, outside the time that is taken: for calls
        that are bound by memory, which would find their operands in L2 after the first.
    """

    def __init__(
        self, rest_s: float = REST_S, flush_bytes: int = 512 << 20, every_call: bool = False
    ) -> None:
        import cupy

        self._cupy = cupy
        self._rest_s = rest_s
        self._every_call = every_call
        self._scratch = cupy.empty(flush_bytes, dtype=cupy.int8)

    def burst(self, call: Call, calls: int) -> Reading:
        """Queue `calls` calls between events; the reading waits for the last one."""
        event = self._cupy.cuda.Event
        parts = (calls, 1) if self._every_call else (1, calls)
        spans = []
        for _ in range(parts[0]):
            start, stop = event(), event()
            self._scratch.data.memset_async(0, self._scratch.nbytes)
            start.record()
            for _ in range(parts[1]):
                call()
            stop.record()
            spans.append((start, stop))

        def reading() -> float:
            spans[-1][1].synchronize()
            elapsed = self._cupy.cuda.get_elapsed_time
            return sum(float(elapsed(start, stop)) for start, stop in spans) / calls

        return reading

    def rest(self) -> None:
        """Sleep."""
        time.sleep(self._rest_s)
