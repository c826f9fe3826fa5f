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
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

from cufa.compiler import driver

_LEGACY = 1
"""Up to there, what stands for streams that are never destroyed (``cudaStreamLegacy``)."""

_PER_THREAD = 2
"""What stands for the default stream of each thread (``cudaStreamPerThread``): it ends with it."""

_LOOKED_AT = 2
"""Of the streams that are kept, so many may go when one comes: there are soon no more than must."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Streams:
    """Streams of CuPy that are kept."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._lock = threading.Lock()

    def may_overlap(self, stream: Any) -> bool:
        """Whether a kernel given to a stream now may begin before those in front of it have ended.

        If the stream is CuPy's it is kept until that kernel is done. Else somebody might destroy
        it; but what is captured runs elsewhere.

        Parameters
        ----------
        stream : cupy.cuda.Stream or cupy.cuda.ExternalStream
        """
        return self._keep(stream) or bool(stream.is_capturing())

    def _keep(self, stream: Any) -> bool:
        pointer = stream.ptr
        if self._kept.get(pointer) is stream or pointer <= _LEGACY:
            return True
        if not _is_of_cupy(stream):
            return False
        self._let_go()
        self._kept[pointer] = stream
        return True

    def _let_go(self) -> None:
        """Let some go that are done, and that nobody else has, who might give them work."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            kept = self._kept
            for pointer in list(itertools.islice(kept, _LOOKED_AT)):
                if _references(kept, pointer) == _NO_OTHER and _is_done(kept[pointer]):
                    del kept[pointer]
                else:
                    kept[pointer] = kept.pop(pointer)  # the others' turn comes first
        finally:
            self._lock.release()


streams = Streams()
"""Those in which overlapping kernels are pending."""


def _references(kept: dict[int, Any], pointer: int) -> int:
    return sys.getrefcount(kept[pointer])


_NO_OTHER = _references({0: object()}, 0)


def _is_of_cupy(stream: Any) -> bool:
    """Whether a stream is there as long as its object, and all threads mean the same by it."""
    import cupy

    return (
        isinstance(stream, cupy.cuda.Stream)
        and stream.ptr != _PER_THREAD
        and getattr(stream, "_foreign_stream_ref", None) is None  # see `Stream.from_external`
    )


def _is_done(stream: Any) -> bool:
    """Whether nothing is pending in a stream; not if it is part of a capture, or was of one."""
    try:
        with _captures_undisturbed():
            return not stream.is_capturing() and bool(stream.done)
    except RuntimeError:
        return False


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
