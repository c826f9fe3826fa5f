"""Numbers that the host sends to the device, which takes them in the order of its stream."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Array


class _Sent(NamedTuple):
    """Memory that a copy is read from, until its event is done."""

    memory: Any
    array: np.ndarray
    event: Any


class Outbox:
    """Copies of one array of the host to one of the device, on the current stream.

    The copy is from memory of its own, which no later change of the host's array reaches. Nothing
    waits for the device: there is as much such memory as copies are pending.
    """

    def __init__(self) -> None:
        self._sent: deque[_Sent] = deque()

    def send(self, host: np.ndarray, device_array: Array) -> None:
        """Copy an array; each time of the same size, and contiguous.

        Parameters
        ----------
        host : ndarray
        device_array : array
            A CuPy array.
        """
        import cupy

        stream = cupy.cuda.get_current_stream()
        if self._sent and self._sent[0].event.done:
            free = self._sent.popleft()
        else:
            memory = cupy.cuda.alloc_pinned_memory(host.nbytes)
            array = np.frombuffer(memory, host.dtype, host.size).reshape(host.shape)
            free = _Sent(memory, array, cupy.cuda.Event(disable_timing=True))
        free.array[...] = host
        device_array.data.copy_from_host_async(free.memory.ptr, host.nbytes, stream)
        free.event.record(stream)
        self._sent.append(free)
