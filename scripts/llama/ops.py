"""The model's operations: written once for NumPy and CuPy arrays, with kernels for a GPU.

Sums are float32, and so is the stream of states from layer to layer; what enters a product is
rounded to the matrices' dtype.
"""

import numpy as np
from models import Array, Linear, cuda, flat, module_of, rows


def rms_norm(x: Array, weight: Array, eps: float, dtype: np.dtype) -> Array:
    """Return `x` divided by its root mean square over the last axis, times `weight`."""
    if not isinstance(x, np.ndarray):
        y = cuda.empty(x.shape, dtype)
        rows.rms_norm(x, weight, y, eps)
        return y
    scale = (x * x).mean(axis=-1, keepdims=True)
    scale += np.float32(eps)
    normed = x * scale**-0.5
    normed *= weight
    return normed.astype(dtype, copy=False)


def rms_norm_inplace(x: Array, weight: Array, eps: float) -> None:
    """Do the same to `x` itself, a view of whatever dtype."""
    if isinstance(x, np.ndarray):
        x[...] = rms_norm(x.astype(np.float32), weight, eps, x.dtype)
    else:
        rows.rms_norm(x, weight, x, eps)


def gated(gate_up: Array, gate: str) -> Array:
    """Return silu(a) * b or gelu(a) * b of (n, 2 * inner), a in front of b (Shazeer 2020).

    Or gpt-oss's "clamped": a * sigmoid(1.702 a) * (b + 1), of what is cut off at 7, b at -7, too.
    """
    a, b = gate_up[:, : gate_up.shape[1] // 2], gate_up[:, gate_up.shape[1] // 2 :]
    # The logistic function by tanh, which cannot overflow: silu(x) = x / 2 (1 + tanh(x / 2)).
    if gate == "clamped":
        a = a.clip(None, _LIMIT)
        result = a * np.float32(0.5)
        result += result * module_of(a).tanh(_HALF_ALPHA * a)
        result *= b.clip(-_LIMIT, _LIMIT) + np.float32(1)
        return result
    result = a * np.float32(0.5)
    result += result * module_of(a).tanh(
        result if gate == "silu" else _GELU * (a + _CUBIC * a * a * a)
    )
    result *= b
    return result


#: gelu(x) is about x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), Hendrycks and Gimpel 2016.
_GELU, _CUBIC = np.float32((2 / np.pi) ** 0.5), np.float32(0.044715)

_LIMIT, _HALF_ALPHA = np.float32(7), np.float32(1.702 / 2)


def softcapped(x: Array, cap: float) -> Array:
    """Return cap * tanh(x / cap)."""
    result = module_of(x).tanh(x * np.float32(1 / cap))
    result *= np.float32(cap)
    return result


def product(linear: Linear, x: Array, dtype: np.dtype) -> Array:
    """Return what a matrix makes of the rows of `x`, in `dtype`."""
    if flat.takes(linear.weight, len(x)):
        return flat.product(linear.weight, linear.bias, x, dtype)
    return linear(x).astype(dtype, copy=False)


def add_product(
    sums: Array, linear: Linear, x: Array, norm: Array | None = None, eps: float = 0.0
) -> None:
    """Add what a matrix makes of the rows of `x`, and a norm of that, to those of `sums`."""
    if norm is not None:
        single = np.dtype(np.float32)
        sums += rms_norm(product(linear, x, single), norm, eps, single)
    elif flat.takes(linear.weight, len(x)):
        flat.add_product(linear.weight, linear.bias, x, sums)
    else:
        sums += linear(x)


def gated_product(linear: Linear, x: Array, dtype: np.dtype, gate: str) -> Array:
    """Return `gated` of what a matrix makes of the rows of `x`, in `dtype`."""
    if flat.takes(linear.weight, len(x)):
        return flat.gated_product(linear.weight, linear.bias, x, gate)
    if linear.bias is None and not isinstance(x, np.ndarray):
        return rows.gated(linear.unbiased(x), gate)
    return gated(linear(x), gate).astype(dtype, copy=False)


def shares(logits: Array, count: int) -> tuple[Array, Array]:
    """Return the places of the `count` largest of each row, and the softmax of these."""
    places = top(logits, count)
    xp = module_of(logits)
    chosen = xp.take_along_axis(logits, places, axis=-1)
    weights = xp.exp(chosen - chosen[:, :1])  # from the largest on
    weights /= weights.sum(axis=-1, keepdims=True)
    return places, weights


def largest(logits: Array) -> Array:
    """Return the place of the largest of each row, int64."""
    if isinstance(logits, np.ndarray):
        return logits.argmax(axis=-1)
    return rows.largest(_contiguous(logits))


def top(logits: Array, count: int | None) -> Array:
    """Return the places of the largest of each row, from the largest on; of all without a count."""
    if isinstance(logits, np.ndarray) or count is None or count > rows.MOST_TOP:
        return (-logits).argsort(axis=-1)[:, :count]
    return rows.top(_contiguous(logits), min(count, logits.shape[1]))


def _contiguous(x: Array) -> Array:
    return module_of(x).ascontiguousarray(x)
