"""Variant -> compiled kernel: with a GPU by `kernel`, for any architecture without by `compile`."""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cufa.compiler import cache, elf, source
from cufa.device import Device
from cufa.variant import Variant


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
    code_bytes : int
        Size of the instructions.
    log : str
    """

    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    code_bytes: int
    log: str


_STANDARD = "-std=c++17"

# NVRTC from which on a compilation can be answered from the driver's cache.
_NVRTC_CACHES = (13, 0)


def _raw_module_options(device: Device) -> tuple[str, ...]:
    """Return the options for `cupy.RawModule`; the same for all variants on a device.

    CuPy compiles an empty file for each new tuple of options, so what differs between variants is
    in the name expression alone.
    """
    # CuPy names the plain architecture itself; sm_90a, with wgmma and TMA, it does not know.
    if device.arch[-1].isdigit():
        return (_STANDARD,)
    return (_STANDARD, f"-arch={device.arch}")


_lock = threading.Lock()


@functools.cache
def _module(variant: Variant, device: Device) -> Any:
    import cupy

    options = _raw_module_options(device)
    module = cupy.RawModule(
        code=source.text(variant.kernel),
        options=options,
        name_expressions=(variant.name_expression,),
    )
    try:
        module.compile()
    except cupy.cuda.compiler.CompileException as e:
        raise CompileError(variant, options, e.get_message()) from e
    return module


def _allow_shared_memory(function: Any, smem_bytes: int) -> None:
    """Let launches on the current device use this much dynamic shared memory."""
    from cupy.cuda import driver

    attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.funcSetAttribute(function.ptr, attribute, smem_bytes)


def load(cubin: bytes, smem_bytes: int | None = None) -> Any:
    """Make the one kernel of a cubin ready to launch on the current device.

    Parameters
    ----------
    cubin : bytes
    smem_bytes : int, optional
        Dynamic shared memory that a launch may use; 48 KiB by default.

    Returns
    -------
    cupy.cuda.Function

    Raises
    ------
    ValueError
        The cubin is damaged.
    cupy.cuda.driver.CUDADriverError
        It is for another architecture.
    """
    import cupy

    symbol = elf.symbol(cubin)
    module = cupy.cuda.Module()
    module.load(cubin)
    function = module.get_function(symbol)
    if smem_bytes is not None:
        _allow_shared_memory(function, smem_bytes)
    return function


def _compiled_ahead(variant: Variant, device: Device) -> Any:
    """Return the kernel that the user compiled ahead of time, or None."""
    from cupy.cuda import driver

    cubin = cache.find_cubin(variant, device.arch)
    if cubin is None:
        return None
    try:
        return load(cubin, variant.smem_bytes)
    except (ValueError, driver.CUDADriverError) as e:
        path = cache.cubin_path(variant, device.arch)
        warnings.warn(
            f"{path} does not load and is ignored ({e}): delete it, or compile it again with "
            "python -m cufa compile",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@functools.cache
def _kernel(variant: Variant, device: Device, device_id: int) -> Any:
    function = _compiled_ahead(variant, device)
    if function is None:
        # The function itself: calling it spares RawKernel's part of each launch.
        function = _module(variant, device).get_function(variant.name_expression).kernel
        _allow_shared_memory(function, variant.smem_bytes)
    return function


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


@functools.cache
def _started_nvrtc() -> Any:
    from cupy.cuda import nvrtc

    nvrtc.getVersion()  # loads the library
    return nvrtc


def _nvrtc() -> Any:
    """Return CuPy's NVRTC, loaded by one thread: where two do it at once, NVRTC 13.0 fails."""
    with _lock:
        return _started_nvrtc()


@contextmanager
def _compiled(variant: Variant, options: tuple[str, ...]) -> Iterator[Any]:
    """Give a program of NVRTC that is compiled."""
    nvrtc = _nvrtc()

    program = nvrtc.createProgram(source.text(variant.kernel), f"{variant.kernel}.cu", (), ())
    try:
        nvrtc.addNameExpression(program, variant.name_expression)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as e:
            raise CompileError(variant, options, nvrtc.getProgramLog(program)) from e
        yield program
    finally:
        nvrtc.destroyProgram(program)


def compile(variant: Variant, arch: str) -> Compiled:
    """Compile a variant for any architecture, such as "sm_86" or "sm_90a"; needs NVRTC but no GPU.

    Threads can do so at the same time.

    Raises
    ------
    CompileError
    """
    nvrtc = _nvrtc()

    options: tuple[str, ...] = (_STANDARD, f"-arch={arch}", "--ptxas-options=-v")
    if nvrtc.getVersion() >= _NVRTC_CACHES:
        options += ("--no-cache",)  # what comes from the driver's cache has no log
    with _compiled(variant, options) as program:
        cubin, log = elf.whole(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program)

    def number(pattern: str) -> int:
        return sum(int(x) for x in re.findall(pattern, log))

    return Compiled(
        cubin=cubin,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        static_smem_bytes=number(r"(\d+) bytes smem"),
        dynamic_smem_bytes=variant.smem_bytes,
        code_bytes=elf.code_bytes(cubin),
        log=log,
    )


def ptx(variant: Variant, arch: str) -> str:
    """Compile a variant to PTX, for an architecture such as "sm_90a"; needs NVRTC but no GPU.

    Raises
    ------
    CompileError
    """
    nvrtc = _nvrtc()

    options = (_STANDARD, f"-arch={arch.replace('sm_', 'compute_', 1)}")
    with _compiled(variant, options) as program:
        return nvrtc.getPTX(program).decode()
