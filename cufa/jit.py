"""Variant -> compiled kernel: with a GPU by `kernel`, for any architecture without by `compile`."""

from __future__ import annotations

import functools
import re
import struct
import threading
from importlib import resources
from typing import Any, NamedTuple

from cufa.device import Device
from cufa.variant import Variant

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


class CompileError(RuntimeError):
    """A kernel did not compile.

    Attributes
    ----------
    variant : Variant
    options : tuple of str
        The compiler's options.
    log : str
        What NVRTC said.
    """

    def __init__(self, variant: Variant, options: tuple[str, ...], log: str) -> None:
        super().__init__(f"{variant} did not compile with {' '.join(options)}:\n{log}")
        self.variant = variant
        self.options = options
        self.log = log

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the constructor's arguments."""
        return type(self), (self.variant, self.options, self.log)


class Compiled(NamedTuple):
    """What the compiler made of a variant.

    Attributes
    ----------
    cubin : bytes
    registers : int
        A thread's.
    spill_bytes : int
        Register spills to local memory, stores and loads together, a thread.
    stack_bytes : int
        Local memory of a thread.
    static_smem_bytes, dynamic_smem_bytes : int
        Shared memory of a block.
    log : str
    """

    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    log: str


@functools.cache
def source(kernel: str) -> str:
    """Return the text of a kernel with its headers put in place.

    One self-contained text makes CuPy's disk cache right by itself: its key holds the source and
    not what an ``#include`` reaches. ``#line`` keeps messages pointing at the real files.
    """
    folder = resources.files("cufa.kernels")
    done: set[str] = set()

    def expand(name: str) -> str:
        text = (folder / name).read_text(encoding="utf-8")

        def include(match: re.Match[str]) -> str:
            header = match[1]
            if header in done:
                return ""
            done.add(header)
            line = text.count("\n", 0, match.start()) + 2
            return f'#line 1 "{header}"\n{expand(header)}\n#line {line} "{name}"'

        return _INCLUDE.sub(include, text).replace("#pragma once\n", "\n")

    return f'#line 1 "{kernel}.cu"\n{expand(f"{kernel}.cu")}'


_STANDARD = "-std=c++17"

# NVRTC before it refuses a second -arch beside the one that CuPy gives.
_NVRTC_TAKES_TWO_ARCH = (12, 9)


# NVRTC from which on a compilation can be answered from the driver's cache.
_NVRTC_CACHES = (13, 0)


def _raw_module_options(device: Device) -> tuple[str, ...]:
    """Return the options for `cupy.RawModule`; the same for all variants on a device.

    CuPy compiles an empty file for each new tuple of options, so what differs between variants is
    in the name expression alone.
    """
    from cupy.cuda import nvrtc

    # CuPy names the plain architecture itself; sm_90a, with wgmma and TMA, it does not know.
    if device.arch[-1].isdigit() or nvrtc.getVersion() < _NVRTC_TAKES_TWO_ARCH:
        return (_STANDARD,)
    return (_STANDARD, f"-arch={device.arch}")


_lock = threading.Lock()


@functools.cache
def _module(variant: Variant, device: Device) -> Any:
    import cupy

    options = _raw_module_options(device)
    module = cupy.RawModule(
        code=source(variant.kernel),
        options=options,
        name_expressions=(variant.name_expression,),
    )
    try:
        module.compile()
    except cupy.cuda.compiler.CompileException as e:
        raise CompileError(variant, options, e.get_message()) from e
    return module


@functools.cache
def _kernel(variant: Variant, device: Device, device_id: int) -> Any:
    kernel = _module(variant, device).get_function(variant.name_expression)
    kernel.max_dynamic_shared_size_bytes = variant.smem_bytes
    return kernel.kernel  # calling the function itself spares RawKernel's part of each launch


def kernel(variant: Variant, device: Device, device_id: int) -> Any:
    """Compile a variant for the current device, or find it in the cache; make it ready to launch.

    Safe to call from several threads, and from several processes that share a disk cache.

    Parameters
    ----------
    variant : Variant
    device : Device
    device_id : int
        The current device; the limit on shared memory is set for each.

    Returns
    -------
    cupy.cuda.Function

    Raises
    ------
    CompileError
    """
    with _lock:
        return _kernel(variant, device, device_id)


def _whole(cubin: bytes) -> bytes:
    """Put back the last byte, a NUL, which CuPy takes for the end of a string and drops."""
    (header_offset,) = struct.unpack_from("<Q", cubin, 32)
    entry_size, entries = struct.unpack_from("<HH", cubin, 54)
    return cubin.ljust(header_offset + entry_size * entries, b"\0")


def compile(variant: Variant, arch: str) -> Compiled:
    """Compile a variant for any architecture, such as "sm_86" or "sm_90a"; needs NVRTC but no GPU.

    Raises
    ------
    CompileError
    """
    from cupy.cuda import nvrtc

    options: tuple[str, ...] = (_STANDARD, f"-arch={arch}", "--ptxas-options=-v")
    if nvrtc.getVersion() >= _NVRTC_CACHES:
        options += ("--no-cache",)  # what comes from the driver's cache has no log
    program = nvrtc.createProgram(source(variant.kernel), f"{variant.kernel}.cu", (), ())
    try:
        nvrtc.addNameExpression(program, variant.name_expression)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as e:
            raise CompileError(variant, options, nvrtc.getProgramLog(program)) from e
        cubin, log = _whole(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)

    def number(pattern: str) -> int:
        return sum(int(x) for x in re.findall(pattern, log))

    return Compiled(
        cubin=cubin,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        static_smem_bytes=number(r"(\d+) bytes smem"),
        dynamic_smem_bytes=variant.smem_bytes,
        log=log,
    )
