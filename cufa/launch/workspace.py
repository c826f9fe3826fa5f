"""Memory in which the kernels of one call leave numbers for each other, whatever it held before.

The calls of a stream follow each other, and have the same memory: the largest that one needed is
kept. A call that is captured into a CUDA graph takes it for good, since the graph may be
replayed at any time; the next ordinary call gets another.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.launch.scratch import PER_THREAD, current_capture, of_thread
from cufa.remembered import remember

_STREAMS = 8  # whose memory is kept, and of all captures under way


class Workspace:
    """The memory of one device.

    Attributes
    ----------
    lock : threading.Lock
        To be held from `take` until all launches of the call are queued, since those of another
        thread's call on the stream use the same memory.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._of_stream: dict[int, Array] = {}
        self._of_capture: dict[tuple[int, int], Array] = {}
        self._captured: list[Array] = []  # as long as we live

    def take(self, words: int) -> Any:
        """Return memory for a call on the current stream; the lock is held.

        Parameters
        ----------
        words : int
            Their number, of 32 bits each.

        Raises
        ------
        ValueError
            The stream is being captured, and has no memory that is large enough.
        """
        import cupy

        stream = cupy.cuda.get_current_stream()
        key = of_thread() if stream.ptr == PER_THREAD else stream.ptr
        if stream.is_capturing():
            return self._take_for_capture(key, words)
        memory = self._of_stream.get(key)
        if memory is None or memory.size < words:
            self._of_stream.pop(key, None)  # it goes back to CuPy's pool, for this stream
            memory = cupy.empty((words,), np.float32)
            remember(self._of_stream, key, memory, _STREAMS)
        return memory

    def _take_for_capture(self, stream: int, words: int) -> Array:
        key = current_capture()
        memory = self._of_capture.get(key, self._of_stream.get(stream))
        if memory is None or memory.size < words:
            raise ValueError(
                "a backward pass is captured into a CUDA graph, for which no memory is set aside: "
                "make such a call before it on the stream that is captured, outside of the graph"
            )
        if key not in self._of_capture:
            del self._of_stream[stream]
            self._captured.append(memory)
            # Captures that are over need no entry: their number does not come again.
            remember(self._of_capture, key, memory, _STREAMS)
        return memory


_of_device: dict[int, Workspace] = {}


def of_device(device_id: int) -> Workspace:
    """Return the memory of a device."""
    return _of_device.get(device_id) or _of_device.setdefault(device_id, Workspace())
