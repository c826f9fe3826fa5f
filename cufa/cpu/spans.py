"""A range in parts of equal length."""

from __future__ import annotations

from collections.abc import Iterator


def spans(first: int, end: int, step: int) -> Iterator[slice]:
    """Yield the parts of a range, of `step` each but for the last."""
    for start in range(first, end, step):
        yield slice(start, min(start + step, end))
