"""The model's elementary operations, written once for NumPy and CuPy arrays, in float32."""

from functools import cache
from math import erf as exact_erf
from math import exp, pi, sqrt

import numpy as np
from models import Array

# The table of erf: steps of 1/256, so that two Taylor terms leave an error under 3e-9.
ERF_STEPS = 256
ERF_LIMIT = 4  # 1 - erf(4) is 1.5e-8, under half a float32 step at 1


def layer_norm(x: Array, weight: Array, bias: Array, eps: float = 1e-12) -> Array:
    """Return `x` normalised over its last axis, then scaled and shifted (float32)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    centred *= (variance + eps) ** -0.5
    centred *= weight
    centred += bias
    return centred


def gelu(x: Array) -> Array:
    """Return the exact GELU, x * Phi(x) with Phi by erf (Hendrycks and Gimpel 2016), in float32."""
    result = erf(x * np.float32(sqrt(0.5)))
    result += 1
    result *= x
    result *= 0.5
    return result


def erf(x: Array) -> Array:
    """Return the error function of a float32 array, to float32 accuracy (1e-7 absolute)."""
    if isinstance(x, np.ndarray):
        return _erf_numpy(x)
    from cupyx.scipy.special import erf as cupyx_erf

    return cupyx_erf(x)


def _erf_numpy(x: np.ndarray) -> np.ndarray:
    # NumPy has no erf. Around the nearest node g of a fine table, with d = x - g:
    # erf(x) = erf(g) + erf'(g) (d - g d^2) + O(d^3).
    values, slopes = _erf_table()
    x = np.clip(x, -ERF_LIMIT, ERF_LIMIT)
    node = np.rint(x * ERF_STEPS)
    index = node.astype(np.int32)
    index += ERF_LIMIT * ERF_STEPS
    node /= ERF_STEPS
    x -= node  # d, exactly
    node *= x
    x -= node * x  # d - g d^2
    x *= slopes.take(index)
    x += values.take(index)
    return x


@cache
def _erf_table() -> tuple[np.ndarray, np.ndarray]:
    count = ERF_LIMIT * ERF_STEPS
    nodes = [i / ERF_STEPS for i in range(-count, count + 1)]
    values = np.array([exact_erf(g) for g in nodes], np.float32)
    slopes = np.array([2 / sqrt(pi) * exp(-g * g) for g in nodes], np.float32)
    return values, slopes
