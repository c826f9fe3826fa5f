"""Memory that the blocks of one launch share: words that are 0 before and after it, and numbers.

That of a launch captured into a CUDA graph was set aside by an ordinary call before, and is not
used by anything else from then on, since the graph may be replayed at any time. The launches of
one stream within one capture follow each other, and have the same.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import numpy as np

from cufa.launch import counters
from cufa.launch.counters import is_capturing

_RING = 1 << 20
"""Words that ordinary launches take in turn: far more than those of launches that are pending."""

_LEAST = 1 << 20
"""Bytes that are set aside for a capture, at least."""

_WORD = 4  # bytes
_ALIGNMENT = 256  # bytes


class Scratch:
    """The memory of one device.

    Parameters
    ----------
    device_id : int
    """

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._lock = threading.Lock()
        self._memory: list[Any] = []  # as long as we live
        self._ring = 0  # address of words, and how many
        self._ring_words = 0
        self._next = 0  # of them
        self._largest = _LEAST  # bytes that an ordinary launch has asked for
        self._reserve: tuple[int, int] = 0, 0  # address and bytes
        self._of_capture: dict[tuple[int, int], tuple[int, int]] = {}

    def take(self, words: int, floats: int) -> tuple[int, int, Any]:
        """Return memory for a launch on the current stream.

        Parameters
        ----------
        words : int
            That are 0.
        floats : int
            float32 numbers, of any values.

        Returns
        -------
        int
            The address of the words.
        int
            That of the numbers.
        object
            To be kept until the launch is queued.

        Raises
        ------
        RuntimeError
            The stream is being captured, and what was set aside does not do.
        """
        import cupy

        words_bytes = -(-words * _WORD // _ALIGNMENT) * _ALIGNMENT
        nbytes = words_bytes + _WORD * floats
        if is_capturing():
            address = self._captured(nbytes)
            return address, address + words_bytes, None
        with self._lock:
            self._largest = max(self._largest, nbytes)
            if self._reserve[1] < self._largest:
                self._reserve = self._zeros(self._largest), self._largest
            if self._ring_words < words:
                self._ring_words = max(_RING, 16 * words)
                self._ring = self._zeros(_WORD * self._ring_words)
            if self._next + words > self._ring_words:
                self._next = 0
            first = self._ring + _WORD * self._next
            self._next += words
        numbers = cupy.empty(floats, np.float32)
        return first, numbers.data.ptr, numbers

    def _captured(self, nbytes: int) -> int:
        """Return memory that a capture has for itself."""
        key = _capture()
        with self._lock:
            address, size = self._of_capture.get(key, self._reserve)
            if size < nbytes:
                raise RuntimeError(
                    "no memory is set aside for a captured launch of this size, and none can be "
                    "during a capture: call cufa.decode with such arrays once before it, outside "
                    "of a graph"
                )
            if key not in self._of_capture:
                # Captures that are over need no entry: their number does not come again.
                self._of_capture = {
                    key: (address, size),
                    **dict(list(self._of_capture.items())[:7]),
                }
                self._reserve = 0, 0
        return address

    def _zeros(self, nbytes: int) -> int:
        memory = counters.zeros(nbytes)
        self._memory.append(memory)
        return int(memory.ptr)


@functools.cache
def _capture_info() -> Any:
    import sys

    library = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    return library.cuStreamGetCaptureInfo_v2


def _capture() -> tuple[int, int]:
    """Return which capture the current stream is part of, and the stream."""
    import cupy

    stream = cupy.cuda.get_current_stream().ptr
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _capture_info()(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error:
        raise RuntimeError(f"the driver does not say what is captured (CUresult {error})")
    return number.value, stream


_of_device: dict[int, Scratch] = {}


def of_device(device_id: int) -> Scratch:
    """Return the memory of a device."""
    found = _of_device.get(device_id)
    return found or _of_device.setdefault(device_id, Scratch(device_id))
