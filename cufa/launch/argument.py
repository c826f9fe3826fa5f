"""A kernel's one parameter, as a NumPy scalar with the fields of its struct."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.compiler.dependent import Dependent


def launch(
    function: Any,
    grid: tuple[int, int, int],
    threads: int,
    parameter: np.ndarray,
    smem_bytes: int = 0,
) -> None:
    """Launch a kernel on the current stream.

    Parameters
    ----------
    function : cupy.cuda.Function or Dependent
    grid : tuple of int
    threads : int
        Of a block.
    parameter : ndarray
        Of size 1; when this returns, the driver has copied it.
    smem_bytes : int
        Dynamic shared memory of a block.
    """
    import cupy

    address = parameter.ctypes.data
    if isinstance(function, Dependent):
        function.launch(grid, threads, address, smem_bytes)
    else:
        pointer = cupy.cuda.function.CPointer(address)
        function(grid, (threads, 1, 1), (pointer,), smem_bytes)
