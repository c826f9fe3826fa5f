"""Operations on whole rows between products, on a GPU: a kernel each."""

import numpy as np

from models import cuda
from models.backend import Array
from models.flat import CPP

#: Elements that `top` finds at most: the threads of its blocks.
MOST_TOP = 1024


def rms_norm(x: Array, weight: Array, y: Array, eps: float) -> None:
    """Write x / sqrt(mean(x^2) + eps) * weight, over the last axis, to `y`.

    Parameters
    ----------
    x : cupy.ndarray, (tokens, width) or (tokens, heads, width)
        Tokens may lie apart.
    weight : cupy.ndarray, float32
        The shape of a token's row.
    y : cupy.ndarray
        An array of the shape of `x`; it may be `x`.
    eps : float
    """
    *heads, width = x.shape[1:]
    threads = 128 if width <= 1024 else 512
    types = f"{CPP[x.dtype.name]}, {CPP[y.dtype.name]}"
    function = cuda.kernel("rows", f"rms_norm<{types}, {threads}>")
    count = heads[0] if heads else 1
    strides = (each.strides[0] // each.itemsize for each in (x, y))
    blocks = len(x) * count
    cuda.launch(function, blocks, threads, threads // 8, x, weight, y, eps, width, count, *strides)


def gated(x: Array, gate: str = "silu") -> Array:
    """Return gate(a) b of rows of a and b side by side (Shazeer 2020), in x's dtype.

    Parameters
    ----------
    x : cupy.ndarray, (rows, 2 * width), contiguous
    gate : {"silu", "gelu", "clamped"}
        "gelu" in its form by tanh; "clamped" is gpt-oss's.
    """
    width, chunk = x.shape[1] // 2, 16 // x.itemsize
    threads = 256
    y = cuda.empty((len(x), width), x.dtype)
    size = 1 if width % chunk else chunk
    arguments = f"{CPP[x.dtype.name]}, {size}, {threads}, {gate.upper()}"
    function = cuda.kernel("rows", f"gated<{arguments}>")
    cuda.launch(function, len(x), threads, 0, x, y, width)
    return y


def top(x: Array, count: int) -> Array:
    """Return the places of the largest elements of each row, (rows, count) int64.

    They come from the largest on; of equal ones the first is first.

    Parameters
    ----------
    x : cupy.ndarray, (rows, width) float32, contiguous
    count : int
        At most the width, and `MOST_TOP`.
    """
    threads = MOST_TOP
    places = cuda.empty((len(x), count), np.dtype(np.int64))
    smem_bytes = 8 * threads + 4 * 256
    function = cuda.kernel("rows", f"top<{threads}>")
    cuda.launch(function, len(x), threads, smem_bytes, x, places, x.shape[1], count)
    return places


def largest(x: Array) -> Array:
    """Return the place of the largest element of each row, of several the first, int64.

    Parameters
    ----------
    x : cupy.ndarray, (rows, width) float32, contiguous
    """
    threads = 1024
    places = cuda.empty((len(x),), np.dtype(np.int64))
    function = cuda.kernel("rows", f"largest<{threads}>")
    cuda.launch(function, len(x), threads, threads // 4, x, places, x.shape[1])
    return places
