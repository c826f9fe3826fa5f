"""Orders of the axes of arrays that are quantised, and (batch, heads, seq, head_dim)."""

from __future__ import annotations

from cufa.arrays import Array, Ints
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
    *front, head_dim = shape
    if layout == "thd":
        return 1, front[1], front[0], head_dim
    if len(front) == 3:
        batch, heads, seq = front if layout == "bhsd" else (front[0], front[2], front[1])
        return batch, heads, seq, head_dim
    return (front[0] if len(front) == 2 else 1), 1, front[-1], head_dim


def restored_axes(array: Array, ndim: int, layout: str) -> Array:
    """View (batch, heads, seq, head_dim) in the rank and layout of the source."""
    if layout == "thd":
        return array[0].swapaxes(0, 1)
    if ndim == 4:
        return array if layout == "bhsd" else array.swapaxes(1, 2)
    return array[:, 0] if ndim == 3 else array[0, 0]
