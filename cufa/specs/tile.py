"""Tiles in shared memory, see ``kernels/tile.cuh``."""

from __future__ import annotations


def panel_columns(columns: int) -> int:
    """Return the columns of a panel of a 16-bit tile."""
    return next((n for n in (64, 32) if columns % n == 0), 16)
