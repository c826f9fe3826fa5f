"""Orders of the axes of arrays that are quantized, and (batch, heads, seq, head_dim)."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Ints, as_bhsd
from cufa.checks import check_choice, check_integer

LAYOUTS = ("bhsd", "bshd", "thd")

_MAX_HEAD_DIM = 256


def check_order(layout: object) -> None:
    """Refuse what is no order of axes."""
    check_choice("layout", layout, LAYOUTS)


def check_axes(name: str, shape: object, layout: object) -> None:
    """Refuse a shape that does not fit a layout, and head dims that attention does not take."""
    check_order(layout)
    if not isinstance(shape, tuple):
        raise TypeError(f"{name} must be a tuple of sizes, not {type(shape).__name__}")
    for size in shape:
        check_integer(name, size, "a tuple of integers")
    if layout == "thd" and len(shape) != 3:
        raise ValueError(f"{name} has shape {shape}: layout 'thd' is of 3 axes")
    if not 2 <= len(shape) <= 4:
        raise ValueError(
            f"{name} has shape {shape}: 4 axes, 3 (batch, seq, head_dim) or 2 (seq, head_dim) "
            "are needed"
        )
    if not 1 <= shape[-1] <= _MAX_HEAD_DIM:
        raise ValueError(
            f"{name} has shape {shape}: head_dim must be 1 to {_MAX_HEAD_DIM}, not {shape[-1]}"
        )


def sizes_of(shape: Ints, layout: str) -> Ints:
    """Return (batch, heads, seq, head_dim) of a shape that fits its layout."""
    sizes: Ints = as_bhsd(np.broadcast_to(np.int8(0), shape), layout).shape
    return sizes
