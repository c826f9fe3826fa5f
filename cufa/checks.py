"""Checks of the public functions' arrays: dtype, device, and where the result goes.

Arrays come by name, the one that the others must agree with first; errors name the argument.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from cufa.arrays import Array, has_odd_stride, overlap, overlaps_itself
from cufa.dtypes import DTYPES

LAYOUTS = ("bhsd", "bshd")

#: Native byte order only: a byte-swapped dtype is another key and so is refused.
_DTYPE_NAMES = {row.numpy: row.name for row in DTYPES.values()}

#: The dtypes of bytes in caches.
_BYTES = ("int8", "uint8", "float8_e4m3fn")

#: The kernels multiply scores by scale * log2(e) in float32, which must not overflow: the largest
#: score of float16 arrays is 256 * 65504^2 < 2^41.
_MAX_SCALE = 2.0**64


def check_layout(layout: object) -> None:
    """Refuse what is no order of axes."""
    check_choice("layout", layout, LAYOUTS)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is none of several strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")


def check_flag(name: str, value: object) -> bool:
    """Return what must be True or False as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {type(value).__name__}")
    return bool(value)


def check_integer(name: str, n: object, needed: str = "an integer") -> int:
    """Return an integer as one of Python's, whose arithmetic does not wrap around."""
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"{name} must be {needed}, not {type(n).__name__}")
    return int(n)


def check_size(name: str, n: object, most: int = 2**31 - 1, least: int = 1) -> int:
    """Return a size, `least` to `most`, as an int."""
    size = check_integer(name, n)
    if not least <= size <= most:
        raise ValueError(f"{name} must be {least} to {most}, not {n}")
    return size


def check_module(xp: object) -> None:
    """Refuse what is not the module of the arrays that shall be made."""
    if xp is not np and (xp is None or xp is not sys.modules.get("cupy")):
        raise TypeError(f"xp must be the module numpy or cupy, not {xp!r}")


def check_dtypes(arrays: Mapping[str, Array]) -> str:
    """Return the name of the one dtype that all arrays have."""
    (first, reference), *others = arrays.items()
    dtype = check_dtype(first, reference)
    for name, array in others:
        if array.dtype != reference.dtype:
            raise TypeError(
                f"{name} has dtype {shown_dtype(array.dtype)}, but {first} has dtype {dtype}"
                f"{_way_out_of_8_bits(first, name, array)}"
            )
    return dtype


def _way_out_of_8_bits(first: str, name: str, array: Array) -> str:
    """Return what to give attention in place of the bytes of a cache."""
    if first != "q" or name not in ("k", "v") or array.dtype.name not in _BYTES:
        return ""
    return "; dequantize(dtype=q.dtype) of a cache of 8 bits returns k and v"


def check_dtype(name: str, array: Array) -> str:
    """Return the name of a dtype that attention takes."""
    dtype = _DTYPE_NAMES.get(array.dtype)
    if dtype is None:
        way_out = f"; {name}.astype(numpy.float32) converts it" if array.dtype == np.float64 else ""
        raise TypeError(
            f"{name} has dtype {shown_dtype(array.dtype)}: one of {', '.join(DTYPES)} is needed"
            f"{way_out}"
        )
    return dtype


def shown_dtype(dtype: np.dtype) -> str:
    """Name a dtype; a byte-swapped one says so, because its `name` does not."""
    return dtype.name if dtype.isnative else f"{dtype.name} in non-native byte order ({dtype.str})"


def check_devices(arrays: Mapping[str, Array], xp: Any) -> None:
    """Refuse CuPy arrays that are not on the current device, or not aligned as a GPU needs them.

    `xp` is the module that the arrays belong to; NumPy arrays are all taken.
    """
    if xp is np:
        return
    current = xp.cuda.runtime.getDevice()
    for name, array in arrays.items():
        device = array.data.device_id
        if device != current:
            raise ValueError(
                f"{name} (shape {array.shape}) is on device {device}, "
                f"but the current device is {current}"
            )
        # The GPU faults on an element that is not aligned to its size; even a copy would.
        if array.size and (array.data.ptr % array.itemsize or has_odd_stride(array)):
            raise ValueError(
                f"{name} (shape {array.shape}, strides {array.strides}) has elements at "
                f"addresses that are no multiple of {array.itemsize} bytes"
            )


def check_real(name: str, number: object, needed: str = "a real number") -> float:
    """Return a real number as a float; an integer or a fraction beyond all of them is infinite."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} must be {needed}, not {type(number).__name__}")
    try:
        return float(number)
    except OverflowError:
        return math.inf


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor of the scores; 1 / sqrt(head_dim) for None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = check_real("scale", scale, "a real number or None")
    if not abs(value) < _MAX_SCALE:  # also true for NaN
        raise ValueError(f"scale must be less than 2^64 in magnitude, not {value!r}")
    return value


def check_seed(seed: object) -> int:
    """Return the seed of random numbers as 64 bits."""
    value = check_integer("seed", seed)
    if not 0 <= value < 2**64:
        raise ValueError(f"seed must be 0 to 2^64 - 1, not {seed}")
    return value


def check_out(
    out: Array, shape: tuple[int, ...], inputs: Mapping[str, Array], name: str = "out"
) -> None:
    """Refuse an `out` that could not hold the result, or would change the inputs under way.

    `name` is that of the argument.
    """
    if out.shape != shape:
        given = ", ".join(f"{other} {array.shape}" for other, array in inputs.items())
        raise ValueError(f"{name} has shape {out.shape}, but shape {shape} is needed ({given})")
    if not getattr(out.flags, "writeable", True):  # CuPy arrays are always writable
        raise ValueError(f"{name} (shape {out.shape}) is read-only")
    if overlaps_itself(out.shape, out.strides, out.itemsize):
        raise ValueError(
            f"{name} (shape {out.shape}, strides {out.strides}) has elements that share memory"
        )
    check_apart(name, out, inputs)


def check_apart(name: str, written: Array, others: Mapping[str, Array]) -> None:
    """Refuse an array to write that shares memory with others, which are given by name."""
    for other, array in others.items():
        if overlap(written, array):
            raise ValueError(
                f"{name} (shape {written.shape}) shares memory with {other} (shape {array.shape})"
            )
