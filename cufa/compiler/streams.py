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
import sys
import threading
from collections.abc import Iterator
from typing import Any

from cufa.compiler import driver

_MOST = 64
"""Streams that are kept before it is looked which of them can go."""

_PER_THREAD = 2
"""What stands for the default stream of each thread (``cudaStreamPerThread``): it ends with it."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Streams:
    """Streams of CuPy that are kept."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._most = _MOST
        self._lock = threading.Lock()

    def keep(self, stream: Any) -> bool:
        """Keep a stream until all that it is given is done; return whether that can be.

        Not one that somebody else may destroy.

        Parameters
        ----------
        stream : cupy.cuda.Stream or cupy.cuda.ExternalStream
        """
        pointer = stream.ptr
        if self._kept.get(pointer) is stream:
            return True
        if not _can_be_kept(stream):
            return False
        self._kept[pointer] = stream
        if len(self._kept) > self._most:
            self._let_go()
        return True

    def _let_go(self) -> None:
        """Let those go that are done, and that nobody else has, who might give them work."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            kept = self._kept
            with _captures_undisturbed():
                for pointer in list(kept):
                    if _references(kept, pointer) == _NO_OTHER and kept[pointer].done:
                        del kept[pointer]
            self._most = max(_MOST, 2 * len(kept))
        finally:
            self._lock.release()


def _references(kept: dict[int, Any], pointer: int) -> int:
    return sys.getrefcount(kept[pointer])


_NO_OTHER = _references({0: object()}, 0)


def _can_be_kept(stream: Any) -> bool:
    """Whether a stream is there as long as its object, and all threads mean the same by it."""
    import cupy

    return isinstance(stream, cupy.cuda.Stream) and stream.ptr != _PER_THREAD


@functools.cache
def _exchange_capture_mode() -> Any:
    return driver.function("cuThreadExchangeStreamCaptureMode", keeps_lock=True)


@contextlib.contextmanager
def _captures_undisturbed() -> Iterator[None]:
    """Let a stream be asked whether it is done while another one is captured, by any thread."""
    mode = ctypes.c_int(_RELAXED)
    _exchange_capture_mode()(ctypes.byref(mode))
    try:
        yield
    finally:
        _exchange_capture_mode()(ctypes.byref(mode))
