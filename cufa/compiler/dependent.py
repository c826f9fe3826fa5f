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
import threading
from collections.abc import Callable
from typing import Any, Protocol

from cufa.compiler import context, driver

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


class Parameter(Protocol):
    """A kernel's one parameter."""

    address: int


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("unused", ctypes.c_char * 60),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_ATTRIBUTE = _Attribute(_SERIALIZATION, 0, 1)
_ATTRIBUTE_ADDRESS = ctypes.addressof(_ATTRIBUTE)
_CONFIG = struct.Struct("@7I2PI0P")  # the members of `Config`, in order


def packed(
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem_bytes: int,
    *,
    overlap: bool = True,
) -> bytes:
    """Return the bytes of a `Config`, for a stream to be named.

    A new grid costs 0.3 us so, and 8 us if ctypes makes a `Config`.
    """
    return _CONFIG.pack(*grid, *block, smem_bytes, 0, _ATTRIBUTE_ADDRESS, overlap)


def config(
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem_bytes: int,
    *,
    overlap: bool = True,
) -> Config:
    """Return what tells the driver of a launch, for a stream to be named."""
    return Config.from_buffer_copy(packed(grid, block, smem_bytes, overlap=overlap))


class _Passed(threading.local):
    """Arguments of the driver's launch, made once for a thread."""

    def __init__(self) -> None:
        self.config = Config()
        self.config_address = ctypes.addressof(self.config)
        self.bytes = memoryview((ctypes.c_char * ctypes.sizeof(Config)).from_buffer(self.config))
        self.bytes = self.bytes.cast("B")
        self.parameters = (ctypes.c_void_p * 1)()
        self.parameters_address = ctypes.addressof(self.parameters)


_passed = _Passed()


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
        self._function = function  # keeps its module loaded
        self._pointer = function.ptr

    def launcher(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], smem_bytes: int
    ) -> Callable[[Parameter], None]:
        """Return what launches it on the current stream, with a parameter."""
        import cupy

        overlapping = packed(grid, block, smem_bytes)
        alone = packed(grid, block, smem_bytes, overlap=False)
        launch, current_stream = launch_kernel(), cupy.cuda.get_current_stream

        def launched(parameter: Parameter) -> None:
            passed, stream = _passed, current_stream()
            # First: what is collected when a tuple is made may launch kernels, too.
            arguments = passed.config_address, self._pointer, passed.parameters_address, None
            given = overlapping if may_overlap(stream) else alone, stream.ptr
            passed.bytes[:], passed.config.stream = given
            passed.parameters[0] = parameter.address
            error = launch(*arguments)
            if error == context.INVALID:
                context.make_current()  # and what that collects may launch kernels
                passed.bytes[:], passed.config.stream = given
                passed.parameters[0] = parameter.address
                error = launch(*arguments)
            if error:
                raise cupy.cuda.driver.CUDADriverError(error)

        return launched
