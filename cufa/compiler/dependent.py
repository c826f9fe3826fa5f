"""Programmatic dependent launch: a kernel begins while the one before it in its stream still ends.

Its blocks are then there, and wait in ``begin_dependent`` of ``kernels/ptx.cuh``, when the last
block of the other is done: a launch takes some 1.5 us less. Without the attribute that this sets,
or after kernels that know nothing of it, that wait is over at once.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import Any

FIRST_CAPABILITY = 90
"""The first devices that can, ten times their compute capability."""

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("unused", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class _Launch(threading.local):
    """What is passed to the driver, made once for a thread."""

    def __init__(self) -> None:
        self.attribute = _Attribute(_SERIALIZATION, 0, 1)
        self.config = _Config(attributes=ctypes.pointer(self.attribute), attribute_count=1)
        self.parameters = (ctypes.c_void_p * 1)()


_launch = _Launch()


@functools.cache
def _launch_kernel() -> Any:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    function = library.cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


class Dependent:
    """A loaded kernel that is launched so.

    Parameters
    ----------
    function : cupy.cuda.Function
    """

    def __init__(self, function: Any) -> None:
        import cupy

        self._function = function  # keeps its module loaded
        self._pointer = function.ptr
        self._current_stream = cupy.cuda.get_current_stream
        self._launch_kernel = _launch_kernel()

    def launch(
        self, grid: tuple[int, int, int], threads: int, parameter: int, smem_bytes: int
    ) -> None:
        """Launch on the current stream; `parameter` is the address of the kernel's one."""
        launch = _launch
        config = launch.config
        config.grid[:] = grid
        config.block[:] = (threads, 1, 1)
        config.smem_bytes = smem_bytes
        config.stream = self._current_stream().ptr
        launch.parameters[0] = parameter
        error = self._launch_kernel(
            ctypes.addressof(config), self._pointer, ctypes.addressof(launch.parameters), None
        )
        if error:
            from cupy.cuda import driver

            raise driver.CUDADriverError(error)
