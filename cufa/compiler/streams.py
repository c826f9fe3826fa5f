"""Streams that are kept until the overlapping kernels that they were given are done.

CuPy destroys a stream with the last reference to it, whatever is pending in it, as CUDA allows. But
a kernel that is there before the one in front of it has ended, see `cufa.compiler.dependent`, then
may wait for that without end: so it was seen with driver 580 where processes share a GPU, of
several such kernels in a stream, and never of one whose stream was still there, nor of graphs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

from cufa.compiler import driver

_MOST = 64
"""Streams that are kept before it is looked which of them are done."""

_PER_THREAD = 2
"""What stands for the default stream of each thread (``cudaStreamPerThread``): it ends with it."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Streams:
    """Streams of CuPy that are kept."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._most = _MOST
        self._lock = threading.Lock()

    def may_overlap(self, stream: Any) -> bool:
        """Whether kernels given to a stream may be there before those in front of them have ended.

        Not where somebody else may destroy it too early; in a graph it is not what they run in.

        Parameters
        ----------
        stream : cupy.cuda.Stream or cupy.cuda.ExternalStream
        """
        return self._kept.get(stream.ptr) is stream or _can_be_kept(stream) or stream.is_capturing()

    def keep(self, stream: Any) -> None:
        """Keep a stream, if it is one of CuPy's, until all that it has been given so far is done.

        Parameters
        ----------
        stream : cupy.cuda.Stream or cupy.cuda.ExternalStream
        """
        if self._kept.get(stream.ptr) is stream or not _can_be_kept(stream):
            return
        self._kept[stream.ptr] = stream
        if len(self._kept) > self._most:
            self._let_go()

    def _let_go(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            with _capture_of_others_undisturbed():
                for pointer, stream in list(self._kept.items()):
                    # In this order: what is given to it from now on is followed by another `keep`.
                    self._kept.pop(pointer, None)
                    if not stream.done:
                        self._kept.setdefault(pointer, stream)
            self._most = max(_MOST, 2 * len(self._kept))
        finally:
            self._lock.release()


def _can_be_kept(stream: Any) -> bool:
    """Whether a stream is there as long as its object, and all threads mean the same by it."""
    import cupy

    return isinstance(stream, cupy.cuda.Stream) and stream.ptr != _PER_THREAD


@functools.cache
def _exchange_capture_mode() -> Any:
    return driver.function("cuThreadExchangeStreamCaptureMode", keeps_lock=True)


@contextlib.contextmanager
def _capture_of_others_undisturbed() -> Iterator[None]:
    """Let streams be asked for what is pending while any thread captures another one."""
    mode = ctypes.c_int(_RELAXED)
    _exchange_capture_mode()(ctypes.byref(mode))
    try:
        yield
    finally:
        _exchange_capture_mode()(ctypes.byref(mode))
