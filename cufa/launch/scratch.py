"""Memory in which the blocks of one launch leave numbers for each other.

It is all ones before and after a launch, by which blocks know that a number is not there yet. The
launches of one stream follow each other, and have the same memory.

An ordinary call sets memory aside for launches that are captured into a CUDA graph. Nothing else
uses it from then on, since the graph may be replayed at any time. The launches of one stream within
one capture have the same memory.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from typing import Any, NamedTuple

from cufa.compiler import driver
from cufa.launch import counters
from cufa.remembered import remember

_LEAST = 1 << 20
"""Bytes that a stream has, and that are set aside for a capture, at least."""

_STREAMS = 64
"""Streams whose memory is kept, those of captures under way included."""

_KEPT = 32 << 20
"""Bytes that are kept for a stream, at most: more come from CuPy's pool for each launch."""

PER_THREAD = 2
"""The handle of each thread's default stream, ``cudaStreamPerThread``."""

_RESERVES = 8
_RESERVED = 128 << 20
"""Captures that memory is set aside for, and its most bytes, which may be fewer captures' memory.
Launches that need more cannot be captured: those of very many splits."""

_NUMBER = 4  # bytes
_ONES = 0xFF  # of a byte


class NotSetAsideError(RuntimeError):
    """A launch is captured, for which no memory was set aside."""


class Allocation(NamedTuple):
    """Memory of a launch.

    Attributes
    ----------
    address, nbytes : int
    memory : object
        Its owner, to be kept until the launch is queued.
    """

    address: int
    nbytes: int
    memory: Any

    def __index__(self) -> int:
        """Return the address."""
        return self.address


_thread, _threads = threading.local(), itertools.count(1)


def of_thread() -> int:
    """Return a key of this thread's default stream; a thread's ident may come again."""
    key = getattr(_thread, "key", None)
    if key is None:
        key = _thread.key = -next(_threads)
    return int(key)


class Scratch:
    """The memory of one device."""

    def __init__(self) -> None:
        import cupy

        self._current_stream = cupy.cuda.get_current_stream
        self._lock = threading.Lock()
        self._of_stream: dict[int, Allocation] = {}
        self._largest = 0  # bytes that are set aside for a capture
        self._reserves: list[Allocation] = []  # of the next captures
        self._has_reserves = False  # as many as there can be
        self._of_capture: dict[tuple[int, int], Allocation] = {}
        self._captured: list[Allocation] = []  # as long as we live

    def take(self, floats: int) -> Allocation:
        """Return memory for a launch on the current stream.

        Parameters
        ----------
        floats : int
            float32 numbers.

        Raises
        ------
        NotSetAsideError
            The stream is being captured, and the memory that was set aside is too small.
        """
        nbytes = _NUMBER * floats
        stream = self._current_stream()
        if stream.is_capturing():
            return self._take_for_capture(nbytes)
        key = stream.ptr
        if key == PER_THREAD:
            key = of_thread()
        place = self._of_stream.get(key)
        if place is None or place.nbytes < nbytes or not self._has_reserves:
            with self._lock:
                self._set_aside(nbytes)
                place = self._of_stream.get(key)
                if place is None or place.nbytes < nbytes:
                    place = self._give(key, nbytes)
        return place

    def _give(self, key: int, nbytes: int) -> Allocation:
        """Give the current stream `nbytes` of memory.

        Its earlier memory goes back to CuPy's pool, which gives it to nobody but that stream.
        """
        import cupy

        kept = nbytes <= _KEPT
        if kept:
            nbytes = _grown(nbytes)
        memory = cupy.cuda.alloc(nbytes)
        memory.memset_async(_ONES, nbytes)
        place = Allocation(int(memory.ptr), nbytes, memory)
        if kept:
            self._of_stream.pop(key, None)
            remember(self._of_stream, key, place, _STREAMS)
        return place

    def _set_aside(self, nbytes: int) -> None:
        """Have memory for the next captures of launches with `nbytes`, if not huge."""
        if not self._largest or self._largest < nbytes <= _RESERVED:
            self._largest = _grown(min(nbytes, _RESERVED))
            self._reserves.clear()  # no launch has used them
        while len(self._reserves) < min(_RESERVES, _RESERVED // self._largest):
            memory = counters.filled(self._largest, _ONES)
            self._reserves.append(Allocation(int(memory.ptr), self._largest, memory))
        self._has_reserves = True

    def _take_for_capture(self, nbytes: int) -> Allocation:
        """Return memory that a capture has for itself."""
        key = current_capture()
        with self._lock:
            place = self._of_capture.get(key)
            of_capture = place or (self._reserves[-1] if self._reserves else None)
            if of_capture is None or of_capture.nbytes < nbytes:
                raise NotSetAsideError(
                    "no memory is set aside for this captured launch, and none can be during a "
                    "capture: make such a call before it, outside of a graph; "
                    f"each call sets some aside for {_RESERVES} captures at most, and none for a "
                    f"launch that needs more than {_RESERVED >> 20} MiB, as with very many splits, "
                    "or of many sequences with batch_invariant"
                )
            if place is None:
                place = self._reserves.pop()
                self._has_reserves = False
                self._captured.append(place)
                # Captures that are over need no entry: their number does not come again.
                remember(self._of_capture, key, place, _STREAMS)
        return place


def _grown(nbytes: int) -> int:
    """Return a power of two that is enough: memory then grows seldom."""
    return max(_LEAST, 1 << (nbytes - 1).bit_length())


@functools.cache
def _capture_info() -> Any:
    return driver.function("cuStreamGetCaptureInfo_v2", keeps_lock=True)


def current_capture() -> tuple[int, int]:
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
    return _of_device.get(device_id) or _of_device.setdefault(device_id, Scratch())
