"""Programmatic dependent launch: a kernel begins while the one before it in its stream still ends.

Its blocks are then there, and wait in ``wait_for_kernel_in_front`` of ``kernels/ptx.cuh``, when the
last block of the other is done; docs/design/fa3_wgmma.md has the gain. Without the attribute that
this sets, or after kernels that know nothing of it, that wait is over at once.

The attribute is set only in streams that nobody can destroy. With driver 580, where processes share
a GPU, several such kernels of a stream that is destroyed while they are pending may wait without
end; CuPy destroys a stream with the last reference to it. This was never seen with graphs.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, Protocol

from cufa.arrays import Ints
from cufa.compiler import driver

FIRST_CAPABILITY = 90
"""The first devices that can, ten times their compute capability."""

_LEGACY = 1
"""Handles up to this one mean the legacy default stream (``cudaStreamLegacy``), which is never
destroyed. ``cudaStreamPerThread`` is 2: that stream ends with its thread."""

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def may_overlap(stream: Any) -> bool:
    """Whether a kernel given to a stream now may begin before those in front of it have ended.

    Parameters
    ----------
    stream : cupy.cuda.Stream or cupy.cuda.ExternalStream
    """
    return stream.ptr <= _LEGACY or bool(stream.is_capturing())


class Buffer(Protocol):
    """The memory of one launch, with a kernel's one parameter."""

    passed: Passed


_CONFIG = struct.Struct("@7I2PI0P")
"""CUlaunchConfig of cuda.h: grid, block, shared memory, stream, attributes and their number."""

_STREAM = struct.calcsize("@7I0P") // 8  # the word of the stream in it

# CUlaunchAttribute of cuda.h: which one, padding, and a union of 64 bytes.
_ATTRIBUTE = ctypes.create_string_buffer(struct.pack("@3i60x", _SERIALIZATION, 0, 1), 72)
_ATTRIBUTE_ADDRESS = ctypes.addressof(_ATTRIBUTE)


def packed(
    grid: Ints, block: Ints, smem_bytes: int, *, overlap: bool = True, stream: int = 0
) -> bytes:
    """Return the bytes of a CUlaunchConfig; `stream` is a handle, and may be filled in later.

    A new grid costs 0.3 us so, and 8 us with a structure of ctypes.
    """
    return _CONFIG.pack(*grid, *block, smem_bytes, stream, _ATTRIBUTE_ADDRESS, overlap)


class Passed:
    """The arguments of the driver's launch of one parameter, in memory of its own.

    Parameters
    ----------
    parameter : int
        The address of the parameter.

    Attributes
    ----------
    config, parameters : int
        The addresses of a CUlaunchConfig and of the array of parameters.
    bytes, words : memoryview
        The CUlaunchConfig, by 8 and by 64 bits.
    content : bytes
        The bytes that a launch copied to it last; then it filled in the stream.
    """

    __slots__ = ("_parameters", "bytes", "config", "content", "parameters", "words")

    def __init__(self, parameter: int) -> None:
        config = (ctypes.c_char * _CONFIG.size)()
        self.config = ctypes.addressof(config)
        self.bytes = memoryview(config).cast("B")
        self.words = self.bytes.cast("Q")
        self.content = b""
        self._parameters = (ctypes.c_void_p * 1)(parameter)
        self.parameters = ctypes.addressof(self._parameters)


@functools.cache
def launch_kernel() -> Any:
    """Return ``cuLaunchKernelEx``, which takes addresses."""
    function = driver.function("cuLaunchKernelEx", keeps_lock=False)
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


class Dependent:
    """A loaded kernel that is launched so.

    Parameters
    ----------
    function : cupy.cuda.Function
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    def launcher(self, grid: Ints, block: Ints, smem_bytes: int) -> Callable[[Buffer], None]:
        """Return what launches it on the current stream, with the parameter in a buffer."""
        import cupy

        overlapping = packed(grid, block, smem_bytes)
        in_order = packed(grid, block, smem_bytes, overlap=False)
        launch, current_stream = launch_kernel(), cupy.cuda.get_current_stream
        function = self._function.ptr

        # `kept` holds the kernel's module, which is unloaded with its last function.
        def launched(buffer: Buffer, kept: Any = self._function) -> None:
            passed, stream = buffer.passed, current_stream()
            content = overlapping if may_overlap(stream) else in_order
            if passed.content is not content:
                passed.bytes[:] = passed.content = content
            passed.words[_STREAM] = stream.ptr
            error = launch(passed.config, function, passed.parameters, None)
            if error == driver.INVALID_CONTEXT:
                driver.make_context_current()
                error = launch(passed.config, function, passed.parameters, None)
            if error:
                raise cupy.cuda.driver.CUDADriverError(error)

        return launched
