"""Which keys a tile of queries sees, and products in which the others take no part."""

from __future__ import annotations

import functools

import numpy as np

from cufa.problem.problem import Problem


@functools.lru_cache(maxsize=256)
def _sees(problem: Problem, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `Problem.sees`, which the tiles of all heads share."""
    return problem.sees(slice(start, stop))


class Seen:
    """The keys that queries see by their positions.

    Parameters
    ----------
    problem : Problem
    rows : slice
        The queries: those of all heads of a group lie below each other.

    Attributes
    ----------
    by_any, by_all : tuple of int
        The first key that one of the queries sees, and the end; and that all of them see.
    """

    def __init__(self, problem: Problem, rows: slice) -> None:
        self._group = problem.group
        self._first, self._end = _sees(problem, rows.start, rows.stop)
        # Both rise from row to row.
        self.by_any = int(self._first[0]), int(self._end[-1])
        self.by_all = int(self._first[-1]), int(self._end[0])

    def unseen(self, keys: slice, hidden: np.ndarray | None) -> np.ndarray | None:
        """Return where a row does not see a key, by `hidden` or by its position; or None."""
        first, end = self.by_all
        if first <= keys.start and keys.stop <= end:
            return hidden
        j = np.arange(keys.start, keys.stop)
        outside = (j < self._first[:, None]) | (j >= self._end[:, None])
        outside = np.tile(outside, (self._group, 1))[None, None]
        return outside if hidden is None else outside | hidden


def product(weights: np.ndarray, values: np.ndarray, unseen: np.ndarray | None) -> np.ndarray:
    """Multiply weights by values, also if values are infinite or NaN where weights are unseen.

    Parameters
    ----------
    weights : ndarray, (batch, heads, m, n)
        0 where `unseen` is true.
    values : ndarray, (batch, heads, n, d)
    unseen : ndarray of bool or None
        Broadcasts with `weights`.
    """
    found: np.ndarray = np.matmul(weights, values)
    if unseen is None or np.isfinite(found).all():
        return found
    bad = ~np.isfinite(values).all(axis=-1)
    np.matmul(weights, np.where(bad[..., None], np.float32(0), values), out=found)
    for j in np.flatnonzero(bad.any(axis=(0, 1))):
        value = np.where(bad[:, :, j, None], values[:, :, j], np.float32(0))[:, :, None]
        weighted = weights[..., j, None] * value
        found += np.where(unseen[..., j, None], np.float32(0), weighted)
    return found
