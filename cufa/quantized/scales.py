"""How many scales an array has, and which rows share one."""

from __future__ import annotations

from cufa.arrays import Array, Ints
from cufa.checks import check_choice, check_size

_GRANULARITIES = ("block", "head", "tensor")

BLOCK = 128
"""Rows of a block where nothing is said."""

_LEAST_BLOCK, _MOST_BLOCK = 16, 1024


def check_granularity(granularity: object, block: object) -> int | None:
    """Return the rows of a block, and None where scales are not of blocks."""
    check_choice("granularity", granularity, _GRANULARITIES)
    if granularity != "block":
        if block is not None:
            raise ValueError(
                f"block must be None where granularity is {granularity!r}, not {block!r}"
            )
        return None
    rows = check_size("block", BLOCK if block is None else block, _MOST_BLOCK, _LEAST_BLOCK)
    if rows & (rows - 1):
        raise ValueError(
            f"block must be a power of two, {_LEAST_BLOCK} to {_MOST_BLOCK}, not {rows}"
        )
    return rows


def check_sequences(name: str, layout: object, block: int | None, smooth: bool) -> None:
    """Refuse what sequences in blocks of their own, by offsets of this name, do not take."""
    if layout != "thd":
        raise ValueError(f"{name}: layout must be 'thd', not {layout!r}")
    if block is not None and block > BLOCK:
        raise ValueError(f"{name}: block must be {_LEAST_BLOCK} to {BLOCK}, not {block}")
    if smooth:
        raise ValueError(f"{name}: smooth must be False, since a mean would be that of all")


def shape_of_scales(granularity: str, block: int | None, shape: Ints) -> Ints:
    """Return the shape of the scales of an array (batch, heads, seq, ...)."""
    batch, heads, seq = shape[:3]
    if block is not None:
        return batch, heads, -(-seq // block)
    return (batch, heads, 1) if granularity == "head" else (1, 1, 1)


def of_rows(scales: Array, block: int | None, seq: int) -> Array:
    """Return the scale of each row, (batch, heads, seq, 1), or what broadcasts to that."""
    if block is None:
        return scales[..., None]
    return scales.repeat(block, axis=2)[:, :, :seq, None]
