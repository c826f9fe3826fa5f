"""Random operands, visible to CuPy and to PyTorch without a copy."""

from __future__ import annotations

from typing import Any

import cupy
import ml_dtypes
import numpy as np

from benchmarks.cells import Cell

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}

# Factors of `SCORES`.
_SHARPNESS = 8
_RISE = 12 / 64


class Operands:
    """Q, K and V of a cell, (batch, heads, seq, head_dim), contiguous, normally distributed.

    Each draws fresh data from `rng`; `scores` is one of `benchmarks.cells.SCORES`.
    """

    def __init__(self, cell: Cell, rng: Any, scores: str = "normal") -> None:
        self.cell = cell
        q, k, v = (
            rng.standard_normal(shape, dtype=cupy.float32)
            for shape in (cell.q_shape, cell.k_shape, cell.v_shape)
        )
        if scores == "sharp":
            q *= _SHARPNESS
        elif scores == "rising":
            root = (_RISE / cell.scale) ** 0.5
            q[..., 0] = root
            k[..., 0] = root * cupy.arange(cell.sk - 1, -1, -1)
        self.q, self.k, self.v = (x.astype(DTYPES[cell.dtype], copy=False) for x in (q, k, v))
        self._torch: tuple[Any, Any, Any] | None = None

    def torch(self) -> tuple[Any, Any, Any]:
        """Return Q, K and V as PyTorch tensors over the same memory."""
        if self._torch is None:
            self._torch = (to_torch(self.q), to_torch(self.k), to_torch(self.v))
        return self._torch


def to_torch(array: Any) -> Any:
    """Return a PyTorch view of a CuPy array; bfloat16 travels as int16, which DLPack knows."""
    import torch

    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_dlpack(array.view(cupy.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def to_cupy(result: Any) -> Any:
    """Return a CuPy view of a result: of a CuPy array, a PyTorch tensor, or each of a tuple."""
    if isinstance(result, tuple):
        return tuple(map(to_cupy, result))
    if isinstance(result, cupy.ndarray):
        return result
    import torch

    if result.dtype == torch.bfloat16:
        return cupy.from_dlpack(result.view(torch.int16)).view(DTYPES["bfloat16"])
    return cupy.from_dlpack(result)
