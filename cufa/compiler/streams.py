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
from collections import deque
from collections.abc import Iterator
from typing import Any

from cufa.compiler import driver

_LEGACY = 1
"""Up to there, what stands for streams that are never destroyed (``cudaStreamLegacy``)."""

_PER_THREAD = 2
"""What stands for the default stream of each thread (``cudaStreamPerThread``): it ends with it."""

_LOOKED_AT = 2
"""Of the streams that are kept, so many may go for each that comes: soon no more are kept than must
be."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Streams:
    """Streams of CuPy that are kept."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._come: deque[None] = deque()  # so many since some were last let go
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
        self._come.append(None)
        if not self._lock.acquire(blocking=False):  # the next one will do more
            return
        try:
            kept, some = self._kept, _LOOKED_AT * len(self._come)
            try:
                pointers = list(itertools.islice(kept, some))
            except RuntimeError:  # another thread's stream has come meanwhile
                return
            for _ in range(some // _LOOKED_AT):
                self._come.popleft()
            for pointer in pointers:
                if _references(kept, pointer) != _NO_OTHER or not self._goes(pointer):
                    kept[pointer] = kept.pop(pointer)  # the others' turn comes first
        finally:
            self._lock.release()

    def _goes(self, pointer: int) -> bool:
        """Let one go if it is done."""
        with _captures_undisturbed():
            done = _is_done(self._kept[pointer])
            if done:
                del self._kept[pointer]  # which destroys it
        return done


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
        return not stream.is_capturing() and _query()(stream.ptr) == 0
    except RuntimeError:
        return False


@functools.cache
def _query() -> Any:
    """Return ``cuStreamQuery``, which leaves no error behind, as the runtime's does."""
    function = driver.function("cuStreamQuery", keeps_lock=True)
    function.argtypes = (ctypes.c_void_p,)
    return function


@functools.cache
def _exchange_capture_mode() -> Any:
    return driver.function("cuThreadExchangeStreamCaptureMode", keeps_lock=True)


@contextlib.contextmanager
def _captures_undisturbed() -> Iterator[None]:
    """Let streams be asked whether they are done while others are captured, by any thread."""
    mode = ctypes.c_int(_RELAXED)
    _exchange_capture_mode()(ctypes.byref(mode))
    try:
        yield
    finally:
        _exchange_capture_mode()(ctypes.byref(mode))
