"""Random operands of gradients, visible to CuPy and to PyTorch without a copy."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from benchmarks.backward_cases import Case
from benchmarks.inputs import DTYPES, Operands, to_torch


class Data(Operands):
    """Q, K, V and the gradient of the result, dout, all (batch, heads, seq, head_dim).

    Sequences of several lengths are one sequence here: one after the other.

    Parameters
    ----------
    case : Case
    rng : cupy.random.Generator
    """

    def __init__(self, case: Case, rng: Any) -> None:
        super().__init__(case.cell, rng)
        self.case = case
        cell = case.cell
        shape = cell.b, cell.hq, cell.sq, cell.dv
        dout = rng.standard_normal(shape, dtype=cupy.float32)
        self.dout = dout.astype(DTYPES[cell.dtype], copy=False)

    def torch_dout(self) -> Any:
        """Return dout as a PyTorch tensor over the same memory."""
        return to_torch(self.dout)

    def offsets(self) -> Any:
        """Return where sequences begin, and the end of the last one."""
        return cupy.asarray(np.cumsum([0, *self.case.lengths]).astype(np.int32))

    def torch_offsets(self) -> Any:
        """Return the same as a PyTorch tensor."""
        return to_torch(self.offsets())


def packed(array: Any) -> Any:
    """Return (1, heads, total, head_dim) as a contiguous (total, heads, head_dim)."""
    return cupy.ascontiguousarray(array[0].swapaxes(0, 1))
