"""The CUDA kernels of these scripts: compiled when they are first needed, and launched."""

import ctypes
import functools
import hashlib
from pathlib import Path
from typing import Any

import cufa
from cufa.compiler import dependent, nvrtc

FOLDER = Path(__file__).parent
HEADERS = Path(cufa.__file__).parent / "kernels"


@functools.cache
def kernel(file: str, expression: str) -> Any:
    """Return an instantiation of a kernel in a file next to this one, for the current device.

    Parameters
    ----------
    file : str
        Its name without ".cu".
    expression : str
        The kernel's C++ name with its template arguments.

    Returns
    -------
    cupy.RawKernel
    """
    import cupy

    # CuPy's cache goes by the text and not by what it includes.
    headers = b"".join(path.read_bytes() for path in sorted(_headers()))
    digest = hashlib.sha256(headers).hexdigest()
    text = (FOLDER / f"{file}.cu").read_text(encoding="utf-8")
    module = cupy.RawModule(
        code=f'// {digest}\n#line 1 "{file}.cu"\n{text}',
        options=(*nvrtc.common_options(), f"-I{HEADERS}", f"-I{FOLDER}"),
        name_expressions=(expression,),
    )
    return module.get_function(expression)


def _headers() -> list[Path]:
    return [path for folder in (HEADERS, FOLDER) for path in folder.glob("*.cuh")]


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return memory for what a kernel computes."""
    import cupy

    return cupy.empty(shape, dtype)


def launch(function: Any, blocks: int, threads: int, smem_bytes: int, *arguments: Any) -> None:
    """Launch a kernel on the current stream; it may begin while the one before it ends.

    Parameters
    ----------
    function : cupy.RawKernel
        It waits for the one before it by itself.
    blocks, threads : int
        Blocks of the grid, and threads of a block.
    smem_bytes : int
        Dynamic shared memory of a block.
    *arguments : cupy.ndarray, None, int or float
        Pointers, int and float in C++.
    """
    import cupy

    values = [_value(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    stream = cupy.cuda.get_current_stream()
    overlap = _capability() >= dependent.FIRST_CAPABILITY and dependent.may_overlap(stream)
    how = {"overlap": overlap, "stream": stream.ptr}
    packed = dependent.packed((blocks, 1, 1), (threads, 1, 1), smem_bytes, **how)
    config = ctypes.create_string_buffer(packed, len(packed))
    addresses = ctypes.addressof(config), function.kernel.ptr, ctypes.addressof(pointers)
    status = dependent.launch_kernel()(*addresses, None)
    if status:
        raise RuntimeError(f"the driver refuses to launch {function.name} (CUresult {status})")


def _value(argument: Any) -> Any:
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_void_p(None if argument is None else argument.data.ptr)


@functools.cache
def _capability() -> int:
    import cupy

    return int(cupy.cuda.Device().compute_capability)
