"""An exploration on the standard output."""

from __future__ import annotations

from cufa.cli import table
from cufa.explorer.result import Exploration
from cufa.explorer.table import cells, headers, heading


def show(found: Exploration, top: int | None) -> None:
    """Print the first `top` rows, or all, and what is left out."""
    print(f"{heading(found)}\n")
    shown = found.rows[:top]
    timed = any(row.median_us is not None for row in shown)
    table.show(headers(timed), [cells(row, timed) for row in shown])
    left_out = len(found.rows) - len(shown)
    if left_out:
        print(f"and {left_out} more")
    if found.best is not None:
        print(f"\nbest: {found.best.variant}")
