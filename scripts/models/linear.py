"""A matrix of a network, with or without a bias, for NumPy and CuPy arrays."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from models.backend import Array


class Linear:
    """Multiply by a matrix and add a bias: operands rounded to a dtype, sums in float32.

    Activations stay float32 in between, so float16 has no overflow to fear outside of products.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    dtype : numpy.dtype
        float32, float16 or bfloat16: what matrix and input are rounded to.
    weights : sequence of ndarray, (outputs, inputs) each
        Matrices that take the same input; their outputs come side by side.
    biases : sequence of ndarray, (outputs,) each, optional

    Attributes
    ----------
    dtype : numpy.dtype
    weight : array, (all outputs, inputs)
        In `dtype`; but float32 on the CPU, where BLAS has no 16-bit product: the rounded numbers.
    bias : array or None, (all outputs,) float32
    """

    def __init__(
        self,
        xp: Any,
        dtype: np.dtype,
        weights: Sequence[np.ndarray],
        biases: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.dtype = dtype
        self._stored = np.dtype(np.float32) if xp is np else dtype
        outputs = sum(len(weight) for weight in weights)
        self.weight = xp.empty((outputs, weights[0].shape[1]), self._stored)
        start = 0
        for weight in weights:
            # One after the other, so that no second copy of a large matrix is ever held.
            rounded = weight.astype(dtype, copy=False)
            self.weight[start : start + len(weight)] = xp.asarray(rounded)
            start += len(weight)
        self.bias: Array | None = biases and xp.asarray(np.concatenate(biases).astype(np.float32))

    def part(self, start: int, end: int) -> "Linear":
        """Return some of its outputs alone, as a view."""
        part = copy(self)
        part.weight = self.weight[start:end]
        part.bias = None if self.bias is None else self.bias[start:end]
        return part

    def __call__(self, x: Array) -> Array:
        """Return the product, (n, all outputs) float32, of `x` (n, inputs)."""
        product = self.unbiased(x).astype(np.float32, copy=False)
        if self.bias is not None:
            product += self.bias
        return product

    def unbiased(self, x: Array) -> Array:
        """Return it without the bias, in the dtype of `weight`."""
        x = x.astype(self.dtype, copy=False).astype(self._stored, copy=False)
        return x @ self.weight.T
