"""Products of a matrix with few rows, in which reading the matrix is what takes time: by a kernel.

CuPy does not let cuBLAS, which has others, into a CUDA graph.
"""

from typing import NamedTuple

import numpy as np

from models import cuda
from models.backend import Array

#: Rows that a product may have.
MOST_ROWS = 64

# Constants of flat.cuh.
OUTPUTS, GROUP_ROWS = 16, 8

CPP = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}


def takes(weight: Array, rows: int) -> bool:
    """Return whether the kernel is for a product of this matrix with `rows`."""
    whole = weight.shape[1] * weight.itemsize % 16 == 0
    return not isinstance(weight, np.ndarray) and whole and 0 < rows <= MOST_ROWS


def product(weight: Array, bias: Array | None, x: Array, dtype: np.dtype) -> Array:
    """Return x W^T + b, in `dtype`.

    Parameters
    ----------
    weight : cupy.ndarray, (outputs, inputs)
    bias : cupy.ndarray or None, (outputs,) float32
    x : cupy.ndarray, (rows, inputs)
        An array of the dtype of `weight`.
    dtype : numpy.dtype
        Dtype of the result, (rows, outputs).
    """
    return _launch("STORE", weight, bias, x, cuda.empty((len(x), len(weight)), dtype))


def add_product(weight: Array, bias: Array | None, x: Array, sums: Array) -> None:
    """Add it to `sums`, (rows, outputs) float32."""
    _launch("ADD", weight, bias, x, sums)


def gated_product(weight: Array, bias: Array | None, x: Array, gate: str = "silu") -> Array:
    """Return gate(a) b, a and b being the halves of x W^T + b (Shazeer 2020), in x's dtype.

    The gate is "silu", "gelu", in its form by tanh, or "clamped", gpt-oss's.
    """
    y = cuda.empty((len(x), len(weight) // 2), x.dtype)
    return _launch(f"GATE_{gate.upper()}", weight, bias, x, y)


class Tile(NamedTuple):
    """A block of flat.cuh: its template arguments of these names."""

    groups: int
    warps: int
    tiles: int
    lines: int
    blocks: int


def tile_of(rows: int, itemsize: int) -> Tile:
    """Return the tile for a number of rows.

    More rows share what is read of the matrix; more outputs, what is read of the rows. The other
    sizes fill the registers.
    """
    if itemsize == 4:
        return Tile(groups=1, warps=8, tiles=1, lines=1, blocks=2)
    if rows <= GROUP_ROWS:
        return Tile(groups=1, warps=8, tiles=1, lines=2, blocks=3)
    return Tile(groups=2 if rows <= 2 * GROUP_ROWS else 4, warps=8, tiles=2, lines=1, blocks=2)


def arguments(weight: Array, y: Array, finish: str, tile: Tile) -> str:
    """Return the template arguments of a kernel whose blocks have such a tile."""
    types = CPP[weight.dtype.name], CPP[y.dtype.name]
    sizes = tile.groups, finish, tile.warps, tile.tiles, tile.lines, tile.blocks
    return ", ".join(map(str, (*types, *sizes)))


def _launch(finish: str, weight: Array, bias: Array | None, x: Array, y: Array) -> Array:
    outputs, inputs = weight.shape
    rows = len(x)
    tile = tile_of(rows, weight.itemsize)
    block_rows, block_outputs = tile.groups * GROUP_ROWS, tile.tiles * OUTPUTS
    halves = 2 if finish.startswith("GATE") else 1
    blocks = -(-y.shape[1] // (block_outputs // halves)) * -(-rows // block_rows)
    function = cuda.kernel("flat_product", f"flat_product<{arguments(weight, y, finish, tile)}>")
    smem_bytes = 4 * tile.warps * block_rows * block_outputs
    threads = 32 * tile.warps
    cuda.launch(function, blocks, threads, smem_bytes, weight, bias, x, y, outputs, inputs, rows)
    return y
