"""Products of a matrix with few rows, in which reading the matrix is what takes time: by a kernel.

cuBLAS reads a matrix less fast for few rows, and CuPy does not let it into a CUDA graph.
"""

from typing import Any

import numpy as np

from models import cuda
from models.backend import Array

#: Rows that a product may have.
MOST_ROWS = 64

# Constants of flat_product.cu.
THREADS, WARPS, OUTPUTS, GROUP_ROWS = 256, 8, 16, 8

CPP = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}


def takes(weight: Array, rows: int) -> bool:
    """Return whether the kernel is for a product of this matrix with so many rows."""
    whole = weight.shape[1] * weight.itemsize % 16 == 0
    return not isinstance(weight, np.ndarray) and whole and 0 < rows <= MOST_ROWS


def product(weight: Array, bias: Array | None, x: Array, dtype: np.dtype) -> Array:
    """Return x W^T + b, in `dtype`.

    Parameters
    ----------
    weight : cupy.ndarray, (outputs, inputs)
    bias : cupy.ndarray or None, (outputs,) float32
    x : cupy.ndarray, (rows, inputs)
        Of the dtype of `weight`.
    dtype : numpy.dtype
        Of the result, (rows, outputs).
    """
    return _launch("STORE", weight, bias, x, _empty((len(x), len(weight)), dtype))


def add_product(weight: Array, bias: Array | None, x: Array, sums: Array) -> None:
    """Add it to `sums`, (rows, outputs) float32."""
    _launch("ADD", weight, bias, x, sums)


def gated_product(weight: Array, bias: Array | None, x: Array) -> Array:
    """Return silu(a) b, a and b being the halves of x W^T + b (Shazeer 2020), in x's dtype."""
    return _launch("GATE", weight, bias, x, _empty((len(x), len(weight) // 2), x.dtype))


def _empty(shape: tuple[int, int], dtype: Any) -> Array:
    import cupy

    return cupy.empty(shape, dtype)


def _launch(finish: str, weight: Array, bias: Array | None, x: Array, y: Array) -> Array:
    outputs, inputs = weight.shape
    rows = len(x)
    groups = 1 if weight.itemsize == 4 or rows <= 8 else 2 if rows <= 16 else 4
    block_rows = groups * GROUP_ROWS
    blocks = -(-y.shape[1] // (OUTPUTS // (1 + (finish == "GATE")))) * -(-rows // block_rows)
    types = f"{CPP[weight.dtype.name]}, {CPP[y.dtype.name]}"
    function = cuda.kernel("flat_product", f"flat_product<{types}, {groups}, {finish}>")
    smem_bytes = 4 * WARPS * block_rows * OUTPUTS
    cuda.launch(function, blocks, THREADS, smem_bytes, weight, bias, x, y, outputs, inputs, rows)
    return y
