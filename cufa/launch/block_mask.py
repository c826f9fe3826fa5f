"""Arrays -> launches of ``kernels/block_mask.cu`` and ``kernels/block_lists.cu``."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Array, ArrayInfo
from cufa.features.expression.tracing import TracedFunctions
from cufa.features.parts import part_named
from cufa.launch.auxiliary import prepared
from cufa.launch.capture import refuse_memory
from cufa.launch.params import list_sizes
from cufa.problem.extras import Extras, check_function_arrays, placed
from cufa.specs import block_lists
from cufa.specs.block_mask import SPEC
from cufa.specs.instance import Instance

_TILES = SPEC.threads // 32  # of a block: a warp each
_LISTS = Instance(block_lists.SPEC.name, (), (block_lists.SPEC.threads,))


def fill(
    kinds: Array, mask: TracedFunctions, sizes: tuple[int, ...], block: tuple[int, int]
) -> None:
    """Write the kinds of all tiles, on the current device and stream.

    Parameters
    ----------
    kinds : array of uint8
        As in `cufa.BlockMask`.
    mask : TracedFunctions
        A traced `mask_mod`.
    sizes : tuple of int
        Sequences, heads, queries and keys.
    block : tuple of int
        Queries and keys of a tile.

    Raises
    ------
    TypeError, ValueError
        For arrays that the mask cannot read.
    """
    import cupy

    if not mask.parts:
        kinds.fill(2)  # all is seen
        return
    by_axis = dict(zip("bhqk", sizes, strict=True))
    check_function_arrays(mask, by_axis, cupy, "as xp says")
    instance = Instance(SPEC.name, (), (), mask.parts)
    prepared(instance, -(-kinds.size // _TILES), _filled(kinds, mask, by_axis, block))()
    prepared(_LISTS, 1, b"")  # compiles what the first call with the mask needs


def _filled(
    kinds: Array, mask: TracedFunctions, sizes: dict[str, int], block: tuple[int, int]
) -> np.ndarray:
    """Return the kernel's parameter; arguments as in `fill`, but sizes are by their letters."""
    parameter = np.zeros(1, SPEC.parameter(mask.parts))
    p = parameter[0]
    _, heads, rows, columns = kinds.shape
    p["params"] = (kinds.data.ptr, heads, rows, columns, kinds.size, sizes["q"], sizes["k"], *block)
    infos = (ArrayInfo(array.shape, array.strides, array.dtype) for array in mask.arrays)
    numbers_of_parts = placed(mask.parts, 4, sizes, Extras(mods=tuple(infos)))
    for name, numbers in zip(mask.parts, numbers_of_parts, strict=True):
        addresses = (array.data.ptr for array in mask.arrays)
        for number, value in zip(part_named(name).numbers, numbers, strict=True):
            p[name][number.name] = next(addresses) if number.dtype == "u8" else value
    return parameter


def lists(
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

    refuse_memory("block_mask needs memory of its own", "make one like it before")
    batch, heads, kind_rows, kind_columns = kinds.shape
    rows, length = list_sizes(*sizes, *tile)
    lines, columns = batch * heads * rows, length // 2 - 1
    made = cupy.empty((lines, length), np.int32)
    parameter = np.zeros(1, block_lists.SPEC.params)
    grids = kind_rows, kind_columns, *block, rows, columns, *tile
    parameter[0] = (kinds.data.ptr, made.data.ptr, *grids, lines, *sizes)
    prepared(_LISTS, -(-lines // block_lists.SPEC.threads), parameter)()
    return made
