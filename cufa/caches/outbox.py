"""Numbers that the host sends to the device, which takes them in the order of its stream."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from cufa.arrays import Array


class Outbox:
    """Copies of one array of the host to one of the device, on the current stream.

    A copy is made from memory of its own, which later changes of the host's array do not reach.
    Nothing waits for the device: each pending copy has such memory.
    """

    def __init__(self) -> None:
        # Memory that copies are read from, the same as an array, and an event that says when.
        self._sent: deque[tuple[Any, np.ndarray, Any]] = deque()

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
        if self._sent and self._sent[0][2].done:
            memory, array, event = self._sent.popleft()
        else:
            memory = cupy.cuda.alloc_pinned_memory(host.nbytes)
            array = np.frombuffer(memory, host.dtype, host.size).reshape(host.shape)
            event = cupy.cuda.Event(disable_timing=True)
        array[...] = host
        device_array.data.copy_from_host_async(memory.ptr, host.nbytes, stream)
        event.record(stream)
        self._sent.append((memory, array, event))
