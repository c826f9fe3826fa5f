"""Arrays -> launch of ``kernels/block_lists.cu``."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Array
from cufa.launch.auxiliary import prepared
from cufa.launch.capture import is_capturing, no_place
from cufa.launch.params import list_sizes
from cufa.specs.block_lists import SPEC
from cufa.specs.instance import Instance

INSTANCE = Instance(SPEC.name, (), (SPEC.threads,))


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
        raise no_place("block_mask needs memory of its own", "make one like it before")
    batch, heads, kind_rows, kind_columns = kinds.shape
    rows, length = list_sizes(*sizes, *tile)
    lines, columns = batch * heads * rows, length // 2 - 1
    lists = cupy.empty((lines, length), np.int32)
    parameter = np.zeros(1, SPEC.params)
    grids = kind_rows, kind_columns, *block, rows, columns, *tile
    parameter[0] = (kinds.data.ptr, lists.data.ptr, *grids, lines, *sizes)
    prepared(INSTANCE, -(-lines // SPEC.threads), parameter)()
    return lists
