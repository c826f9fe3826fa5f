"""Ranges: in parts of equal length, and as parts of arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def spans(first: int, end: int, step: int) -> Iterator[slice]:
    """Yield the parts of a range, of `step` each but for the last."""
    for start in range(first, end, step):
        yield slice(start, min(start + step, end))


def part_of(whole: np.ndarray, *part: slice) -> np.ndarray:
    """Return a part of an array that broadcasts: all along axes of length 1."""
    pairs = zip(part, whole.shape, strict=False)
    return whole[tuple(span if n > 1 else slice(None) for span, n in pairs)]
