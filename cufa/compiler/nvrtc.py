"""Variant -> cubin or PTX: NVRTC, for any architecture and without a GPU."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cufa.compiler import elf, source
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant

# From this version on, declarations that no kernel needs can be left out.
_MINIMAL = (12, 4)

CUPYS_OPTIONS = ("--device-as-default-execution-space", "-ftz=true")
"""Options that CuPy gives to all modules: code compiled otherwise must compute the same."""

# From this version on, a compilation can be answered from the driver's cache.
_CACHES = (13, 0)


class CompileError(RuntimeError):
    """A kernel did not compile.

    Attributes
    ----------
    variant : Variant or Instance
    options : tuple of str
        The compiler's options.
    log : str
        NVRTC's messages.
    """

    def __init__(self, variant: Variant | Instance, options: tuple[str, ...], log: str) -> None:
        super().__init__(f"{variant} did not compile with {' '.join(options)}:\n{log}")
        self.variant = variant
        self.options = options
        self.log = log

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the constructor's arguments."""
        return type(self), (self.variant, self.options, self.log)


class Compiled(NamedTuple):
    """A variant as the compiler returns it.

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


_lock = threading.Lock()


@functools.cache
def _started() -> Any:
    from cupy.cuda import nvrtc

    nvrtc.getVersion()  # loads the library
    return nvrtc


def _nvrtc() -> Any:
    """Return CuPy's NVRTC, loaded by one thread: where two do it at once, NVRTC 13.0 fails."""
    with _lock:
        return _started()


def version() -> tuple[int, int]:
    """Return NVRTC's major and minor version."""
    major, minor = _nvrtc().getVersion()
    return major, minor


def common_options() -> tuple[str, ...]:
    """Return the options of every compilation."""
    return ("-std=c++17", "-minimal") if version() >= _MINIMAL else ("-std=c++17",)


def wrong_registers(variant: Variant | Instance, registers: int) -> str | None:
    """Say that a kernel got `registers` a thread, and its code counts on others; or None.

    With fewer than its source reckons with, its warps would wait for the missing ones for ever.

    Parameters
    ----------
    variant : Variant or Instance
    registers : int
        A thread's, of the compiled kernel.
    """
    expected = variant.launch_registers
    if expected is None or registers == expected:
        return None
    return (
        f"error: its code counts on {expected} registers a thread at launch, and the compiler gave "
        f"it {registers}"
    )


@contextmanager
def _compiled(variant: Variant | Instance, options: tuple[str, ...]) -> Iterator[Any]:
    """Give a program of NVRTC that is compiled."""
    nvrtc = _nvrtc()

    program = nvrtc.createProgram(source.of(variant), f"{variant.kernel}.cu", (), ())
    try:
        nvrtc.addNameExpression(program, variant.name_expression)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as e:
            raise CompileError(variant, options, nvrtc.getProgramLog(program)) from e
        yield program
    finally:
        nvrtc.destroyProgram(program)


def compile_variant(variant: Variant | Instance, arch: str) -> Compiled:
    """Compile a variant for any architecture, such as "sm_86" or "sm_90a"; needs NVRTC but no GPU.

    Threads can do so at the same time.

    Raises
    ------
    CompileError
    """
    nvrtc = _nvrtc()

    # A kernel from the driver's cache has no log.
    uncached = ("--no-cache",) if version() >= _CACHES else ()
    options = (*common_options(), f"-arch={arch}", *CUPYS_OPTIONS, *uncached, "--ptxas-options=-v")
    with _compiled(variant, options) as program:
        cubin, log = elf.whole(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program)

    def number(pattern: str) -> int:
        return sum(int(x) for x in re.findall(pattern, log))

    registers = number(r"Used (\d+) registers")
    complaint = wrong_registers(variant, registers)
    if complaint is not None:
        raise CompileError(variant, options, f"{complaint}\n{log}")
    return Compiled(
        cubin=cubin,
        registers=registers,
        spill_bytes=number(r"(\d+) bytes spill"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        static_smem_bytes=number(r"(\d+) bytes smem"),
        dynamic_smem_bytes=variant.smem_bytes,
        code_bytes=len(elf.code(cubin)),
        log=log,
    )


def ptx(variant: Variant | Instance, arch: str) -> str:
    """Compile a variant to PTX, for an architecture such as "sm_90a"; needs NVRTC but no GPU.

    Raises
    ------
    CompileError
    """
    options = (*common_options(), *CUPYS_OPTIONS, f"-arch={arch.replace('sm_', 'compute_', 1)}")
    with _compiled(variant, options) as program:
        return _nvrtc().getPTX(program).decode()
