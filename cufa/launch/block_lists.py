"""Arrays -> launch of ``kernels/block_lists.cu``."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Array
from cufa.launch.counters import is_capturing
from cufa.launch.launch import Launcher, PreparedLaunch, ready
from cufa.launch.params import list_sizes
from cufa.specs.block_lists import SPEC
from cufa.specs.instance import Instance


def made(
    kinds: Array, block: tuple[int, int], sizes: tuple[int, int], tile: tuple[int, int]
) -> Array:
    """Return the lists of a kernel's tiles, on the current device and stream.

    Parameters
    ----------
    kinds : array of uint8
        As in `cufa.BlockMask`.
    block : tuple of int
        Queries and keys of its tiles.
    sizes : tuple of int
        Queries and keys.
    tile : tuple of int
        Rows and keys of the kernel's tiles.

    Raises
    ------
    ValueError
        In a capture into a CUDA graph.
    """
    import cupy

    if is_capturing():
        raise ValueError(
            "block_mask needs memory of its own, for which a call that is captured into a "
            "CUDA graph has no place: make one like it before"
        )
    batch, heads, kind_rows, kind_columns = kinds.shape
    rows, length = list_sizes(*sizes, *tile)
    lines, columns = batch * heads * rows, length // 2 - 1
    lists = cupy.empty((lines, length), np.int32)
    parameter = np.zeros(1, SPEC.params)
    grids = kind_rows, kind_columns, *block, rows, columns, *tile
    parameter[0] = (kinds.data.ptr, lists.data.ptr, *grids, lines, *sizes)
    PreparedLaunch(launcher_of(lines), parameter)()
    return lists


def launcher_of(lines: int) -> Launcher:
    """Return what launches the kernel for `lines` lists, compiled for the current device."""
    instance = Instance(SPEC.name, (), (SPEC.threads,))
    return ready(instance, -(-lines // SPEC.threads), SPEC.threads)
