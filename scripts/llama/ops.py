"""The model's elementary operations, written once for NumPy and CuPy arrays, in float32."""

import numpy as np
from models import Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return `x` divided by its root mean square over the last axis, times `weight`."""
    scale = (x * x).mean(axis=-1, keepdims=True)
    scale += np.float32(eps)
    normed = x * scale**-0.5
    normed *= weight
    return normed


def swiglu(gate_up: Array) -> Array:
    """Return silu(gate) * up of (n, 2 * inner), gate beside up (Shazeer 2020)."""
    half = np.float32(0.5)
    gate, up = gate_up[:, : gate_up.shape[1] // 2], gate_up[:, gate_up.shape[1] // 2 :]
    # The logistic function by tanh, which cannot overflow: silu(x) = x / 2 (1 + tanh(x / 2)).
    result = gate * half
    result += result * _tanh(result)
    result *= up
    return result


def _tanh(x: Array) -> Array:
    if isinstance(x, np.ndarray):
        return np.tanh(x)
    import cupy

    return cupy.tanh(x)
