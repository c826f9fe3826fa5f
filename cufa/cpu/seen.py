"""Which keys a tile of queries sees, and products in which the others take no part."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from cufa.problem.problem import Problem


@functools.lru_cache(maxsize=256)
def _sees(problem: Problem, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return `Problem.sees`, which the tiles of all heads share, and the fewest keys of a row."""
    first, end = problem.sees(slice(start, stop))
    return first, end, int((end - first).min())


class Seen:
    """The keys that queries see by their positions.

    Parameters
    ----------
    problem : Problem
    rows : slice
        The queries: those of all heads of a group lie below each other.

    Attributes
    ----------
    first, end : ndarray
        The first key that each query sees, and the end of those; both rise from row to row.
    fewest : int
        The fewest keys that one of them sees.
    by_any, by_all : tuple of int
        The first key that one of the queries sees, and the end; and that all of them see.
    """

    def __init__(self, problem: Problem, rows: slice) -> None:
        self._group = problem.group
        self.first, self.end, self.fewest = _sees(problem, rows.start, rows.stop)
        self.by_any = int(self.first[0]), int(self.end[-1])
        self.by_all = int(self.first[-1]), int(self.end[0])

    def are_seen(self, keys: slice) -> bool:
        """Whether all rows see all of these keys, unless something but positions hides them."""
        first, end = self.by_all
        return first <= keys.start and keys.stop <= end

    def unseen(self, keys: slice, hidden: np.ndarray | None) -> np.ndarray:
        """Return where a row does not see a key, by `hidden` or by its position."""
        j = np.arange(keys.start, keys.stop)
        outside = (j < self.first[:, None]) | (j >= self.end[:, None])
        outside = np.tile(outside, (self._group, 1))[None, None]
        return outside if hidden is None else outside | hidden


def product(
    weights: np.ndarray,
    values: np.ndarray,
    unseen: Callable[[], np.ndarray],
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Multiply weights by values, also if values are infinite or NaN where keys are unseen.

    Parameters
    ----------
    weights : ndarray, (batch, heads, m, n)
        0 where a key is unseen.
    values : ndarray, (batch, heads, n, d)
    unseen : callable
        Returns where keys are, which broadcasts with `weights`; it is called if that matters.
    out : ndarray, optional
        Where the product goes.
    """
    found: np.ndarray = np.matmul(weights, values, out=out)
    if np.isfinite(found).all():
        return found
    nowhere = unseen()
    bad = ~np.isfinite(values).all(axis=-1)
    np.matmul(weights, np.where(bad[..., None], np.float32(0), values), out=found)
    for j in np.flatnonzero(bad.any(axis=(0, 1))):
        value = np.where(bad[:, :, j, None], values[:, :, j], np.float32(0))[:, :, None]
        weighted = weights[..., j, None] * value
        found += np.where(nowhere[..., j, None], np.float32(0), weighted)
    return found
