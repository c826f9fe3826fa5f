"""Counters from which blocks draw their tiles: a word for each launch, zero before and after it.

All memory is set to zero when it is reserved, by an ordinary call: nothing is left to do in a call
that is captured into a CUDA graph.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

from cufa.launch.capture import is_capturing

_RING = 1 << 18
"""Words that ordinary launches take in turn: far more than there can be launches pending."""

_RESERVE = 1 << 15
"""Words that captured launches take for good, set aside at once."""

_WORD = 4  # bytes

low: set[int] = set()
"""Devices of which the last reserve is in use: the next ordinary launch makes another."""


class Counters:
    """The counters of one device.

    A word can be taken again, by whatever stream and thread, because the launch that had it is over
    when the ring has been round. A captured launch keeps its word, because a graph may be replayed
    at any time: the reserve is not used twice, and another is there before it runs out.

    Parameters
    ----------
    device_id : int
    """

    def __init__(self, device_id: int) -> None:
        import cupy

        self._device_id = device_id
        self._current_stream = cupy.cuda.get_current_stream
        self._lock = threading.Lock()
        self._memory: list[Any] = []
        self._ring = 0  # address; 0 until there is memory
        self._turns = itertools.count()
        self._reserve: Iterator[int] = iter(())
        self._next_reserve: Iterator[int] | None = None

    def reserve(self) -> None:
        """Reserve words, if there are none; not while a graph is captured."""
        if self._next_reserve is not None:
            return
        with self._lock:
            if self._next_reserve is None:
                ring = 0 if self._ring else _RING
                memory = filled(_WORD * (ring + _RESERVE), 0)
                self._memory.append(memory)  # as long as we live
                first = memory.ptr
                if ring:
                    self._ring = first
                    first += _WORD * ring
                self._next_reserve = iter(range(first, first + _WORD * _RESERVE, _WORD))
                low.discard(self._device_id)

    def take(self) -> int:
        """Return the address of a word that is 0 when the next kernel of this stream draws.

        Raises
        ------
        RuntimeError
            The stream is being captured, and no word is left.
        """
        if self._current_stream().is_capturing():
            return self._take_for_good()
        if self._next_reserve is None:
            self.reserve()
        return self._ring + _WORD * (next(self._turns) & (_RING - 1))

    def _take_for_good(self) -> int:
        with self._lock:
            address = next(self._reserve, None)
            if address is None and self._next_reserve is not None:
                self._reserve, self._next_reserve = self._next_reserve, None
                low.add(self._device_id)
                address = next(self._reserve)
        if address is None:
            raise RuntimeError(
                "no counter is left for a captured launch, and none can be reserved during a "
                "capture: call cufa.attention once before it, outside of a graph"
            )
        return address


def filled(nbytes: int, byte: int) -> Any:
    """Return memory of one byte for all streams, whatever they have under way."""
    import cupy

    cuda = cupy.cuda
    memory = cuda.Memory(nbytes)  # not of the pool, whose memory may wait for its last use
    stream = cuda.runtime.streamCreateWithFlags(cuda.runtime.streamNonBlocking)
    cuda.runtime.memsetAsync(memory.ptr, byte, nbytes, stream)
    cuda.runtime.streamSynchronize(stream)
    cuda.runtime.streamDestroy(stream)
    return memory


_of_device: dict[int, Counters] = {}


def of_device(device_id: int) -> Counters:
    """Return the counters of a device."""
    return _of_device.get(device_id) or _of_device.setdefault(device_id, Counters(device_id))


def refill() -> None:
    """Make another reserve for the current device, if it needs one and no graph is captured."""
    import cupy

    device_id = cupy.cuda.runtime.getDevice()
    if device_id in low and not is_capturing():
        of_device(device_id).reserve()
