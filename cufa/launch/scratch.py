"""Memory that the blocks of one launch share: words that are 0 before and after it, and numbers.

The launches of one stream follow each other, and have the same numbers. Words come from a ring.

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

_RING = 1 << 20
"""Words that ordinary launches take in turn: far more than those of launches that are pending."""

_CAPTURE_WORDS = 1 << 16
"""Words that a captured launch may have. All launches of a stream in a capture have the same ones,
in front of the numbers: where these begin must not depend on the launch."""

_LEAST = 1 << 20
"""Bytes of numbers that are set aside for a capture, at least."""

_STREAMS = 64
"""Of all captures under way, and outside of captures those whose numbers are kept."""

_KEPT = 16 << 20
"""Bytes of numbers that are kept for a stream, at most; more are taken from CuPy's pool."""

_PER_THREAD = 2
"""What stands for the default stream of each thread: ``cudaStreamPerThread``."""

_RESERVES = 8
_RESERVED = 64 << 20
"""For so many captures memory is set aside, or for as many as so many bytes hold, or for one."""

_WORD = 4  # bytes

_Numbers = tuple[int, int, Any]
"""How many, their address, and what owns them."""


class NotSetAsideError(RuntimeError):
    """A captured launch has not the memory that it needs, and none can be reserved meanwhile."""


class Scratch:
    """The memory of one device.

    Parameters
    ----------
    device_id : int
    """

    def __init__(self, device_id: int) -> None:
        import cupy

        self._device_id = device_id
        self._current_stream = cupy.cuda.get_current_stream
        self._lock = threading.Lock()
        self._memory: list[Any] = []  # words, and what captures have: as long as we live
        self._ring = 0  # address of words, and how many
        self._ring_words = 0
        self._next = 0  # of them
        self._numbers: dict[int, _Numbers] = {}  # of streams
        self._largest = _LEAST  # bytes of numbers that an ordinary launch has asked for
        self._reserves: list[Any] = []  # of the next captures, each with so many numbers
        self._has_reserves = False  # as many as there can be
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
            To be kept until the launch is queued: another thread may need more for this stream.

        Raises
        ------
        NotSetAsideError
            The stream is being captured, and what was set aside does not do.
        """
        stream = self._current_stream()
        if stream.is_capturing():
            address = self._captured(words, _WORD * floats)
            return address, address + _WORD * _CAPTURE_WORDS, None
        key = stream.ptr
        if key == _PER_THREAD:
            key = -threading.get_ident()
        with self._lock:
            if not self._has_reserves or _WORD * floats > self._largest:
                self._set_aside(_WORD * floats)
            at = self._next
            if at + words > self._ring_words:
                at = self._start_of_ring(words)
            self._next = at + words
            found = self._numbers.get(key)
            if found is None or found[0] < floats:
                found = self._more_numbers(key, floats)
            return self._ring + _WORD * at, found[1], found

    def _start_of_ring(self, words: int) -> int:
        """Go back to the first word of a ring that has enough."""
        if self._ring_words < words:
            self._ring_words = max(_RING, 16 * words)
            memory = counters.zeros(_WORD * self._ring_words)
            self._memory.append(memory)
            self._ring = int(memory.ptr)
        return 0

    def _more_numbers(self, key: int, floats: int) -> _Numbers:
        """Return numbers of the current stream, and keep them for its next launches.

        What is no longer kept goes back to CuPy's pool, which gives it to nobody but that stream.
        """
        import cupy

        if _WORD * floats > _KEPT:
            memory = cupy.empty(floats, np.float32)
            return floats, int(memory.data.ptr), memory
        floats = 1 << max(0, floats - 1).bit_length()  # to grow seldom
        memory = cupy.empty(floats, np.float32)
        self._numbers.pop(key, None)
        while len(self._numbers) >= _STREAMS:
            del self._numbers[next(iter(self._numbers))]
        found = self._numbers[key] = floats, int(memory.data.ptr), memory
        return found

    def _set_aside(self, nbytes: int) -> None:
        """Have memory for the next captures, of launches with so many bytes of numbers."""
        if nbytes > self._largest:
            self._largest = 1 << (nbytes - 1).bit_length()  # to grow seldom
            self._reserves.clear()  # no launch has used them
        size = _WORD * _CAPTURE_WORDS + self._largest
        while len(self._reserves) < max(1, min(_RESERVES, _RESERVED // size)):
            self._reserves.append(counters.zeros(size))
        self._has_reserves = True

    def _captured(self, words: int, nbytes: int) -> int:
        """Return memory that a capture has for itself."""
        key = _capture()
        with self._lock:
            address, size = self._of_capture.get(key, (0, self._largest))
            if words > _CAPTURE_WORDS:
                raise NotSetAsideError(
                    f"a captured launch has at most {_CAPTURE_WORDS} blocks, not {words}: take a "
                    "smaller num_splits"
                )
            if size < nbytes or not (address or self._reserves):
                raise NotSetAsideError(
                    "no memory is set aside for this captured launch, and none can be during a "
                    "capture: call cufa.decode with such arrays before it, outside of a graph; "
                    f"each call sets some aside for {_RESERVES} captures at most"
                )
            if not address:
                memory = self._reserves.pop()
                self._has_reserves = False
                self._memory.append(memory)
                address = int(memory.ptr)
                # Captures that are over need no entry: their number does not come again.
                self._of_capture = {
                    key: (address, size),
                    **dict(list(self._of_capture.items())[: _STREAMS - 1]),
                }
        return address


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
