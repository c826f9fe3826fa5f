"""The features of a call on the CPU, between Q K^T and the softmax, tile by tile."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from cufa.cpu.functions import Functions
from cufa.features.dropout import Dropout
from cufa.features.feature import Feature, Tile
from cufa.problem.problem import Problem

Slopes = list[tuple[str, "np.ndarray | None"]]
"""Pairs of a feature's argument and its derivative, or None if that is 1."""


@functools.lru_cache(maxsize=256)
def _sees(problem: Problem, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return what `Problem.sees` does, for the tiles of all heads, and the fewest keys of a row."""
    first, end = problem.sees(slice(start, stop))
    return first, end, int((end - first).min())


class Score:
    """The score of a tile of queries, and which keys these see.

    Scores are (batch, heads_q, rows, keys) arrays. For products with K and V, the heads of a group
    lie below each other, so that they share one product: see `stacked`.

    Parameters
    ----------
    problem : Problem
    tile : Tile
        Which queries; its keys do not matter.
    functions : Functions
        The caller's functions.

    Attributes
    ----------
    problem, rows
        As given.
    by_head, stacked : tuple of int
        Shapes, without the last axis: (sequences, query heads, rows), and (sequences, K/V heads,
        rows of all heads of a group).
    is_more_than_scaled : bool
        Whether `apply` does more than multiply by the scale, and so has to be given it.
    fewest : int
        The fewest keys that a query sees by its position.
    by_any : tuple of int
        The first key that any of the queries sees by its position, and the end of what they see.
    sinks : ndarray or None
        The logit that each head has besides its keys; it broadcasts with the scores.
    """

    def __init__(self, problem: Problem, tile: Tile, functions: Functions) -> None:
        self.problem, self.rows, self._functions, self._tile = problem, tile.rows, functions, tile
        self._first, self._end, self.fewest = _sees(problem, tile.rows.start, tile.rows.stop)
        # Neither falls from row to row.
        self.by_any = int(self._first[0]), int(self._end[-1])
        self._by_all = int(self._first[-1]), int(self._end[0])
        batch, heads, rows = (span.stop - span.start for span in tile[:3])
        self.by_head, group = (batch, heads, rows), problem.group
        self.stacked = batch, heads // group, group * rows
        changes = any(feature.CHANGES for feature in problem.features)
        self.is_more_than_scaled = changes or functions.score_mod is not None
        sinks = tile.arrays.get("sinks")
        self.sinks = None if sinks is None else sinks[:, None, None]

    def _at(self, keys: slice) -> Tile:
        return self._tile._replace(keys=keys)

    def stack(self, x: np.ndarray) -> np.ndarray:
        """Return rows of heads, with those of a group below each other, float32."""
        stacked = np.asarray(x, np.float32).reshape(*self.stacked, x.shape[-1])
        return np.ascontiguousarray(stacked)

    def unstack(self, x: np.ndarray) -> np.ndarray:
        """Return a view with the heads of a group apart again: the opposite of `stack`."""
        return x.reshape(*self.by_head, x.shape[-1])

    def apply(
        self,
        scores: np.ndarray,
        scale: np.floating,
        keys: slice,
        slopes: Slopes | None = None,
    ) -> None:
        """Turn Q K^T into scores, in place; append the derivatives of features to `slopes`."""
        tile = self._at(keys)
        for feature in self.problem.features:
            scale = feature.apply(scores, scale, tile)
            if slopes is not None:
                slopes.append((feature.ARGUMENT, feature.slope(scores)))
        if scale != 1:
            scores *= scale
        if slopes is not None:
            if self._functions.partials:
                self._before = scores.copy()
            slopes.append(("score_mod", self._functions.slope(scores, tile)))
        self._functions.apply(scores, tile)

    def gather(self, dS: np.ndarray, keys: slice, into: Mapping[str, np.ndarray]) -> None:
        """Add the gradients of arrays that `score_mod` reads; dS is that of what `apply` made."""
        self._functions.gather(dS, self._before, self._at(keys), into)
        del self._before  # of all tiles of queries, they would take as much memory as Q by keys

    def sees(self, keys: slice) -> bool:
        """Whether any of the queries may see any of these keys."""
        first, end = self.by_any
        return first < keys.stop and keys.start < end and self._functions.see(self._at(keys))

    def hidden(self, keys: slice) -> np.ndarray | None:
        """Return where arrays or `mask_mod` hide keys of a tile, or None."""
        hidden, tile = None, self._at(keys)
        hiding: tuple[Feature | Functions, ...] = (*self.problem.features, self._functions)
        for each in hiding:
            more = each.hidden(tile)
            if more is not None:
                hidden = more if hidden is None else hidden | more
        return hidden

    def are_seen(self, keys: slice, hidden: np.ndarray | None) -> bool:
        """Whether all rows see all of these keys."""
        first, end = self._by_all
        return hidden is None and first <= keys.start and keys.stop <= end

    def unseen(self, keys: slice, hidden: np.ndarray | None) -> np.ndarray:
        """Return where a row does not see a key, by `hidden` or by its position."""
        j = np.arange(keys.start, keys.stop)
        outside = (j < self._first[:, None]) | (j >= self._end[:, None])
        return outside if hidden is None else outside | hidden

    def hide(self, x: np.ndarray, value: float, keys: slice, hidden: np.ndarray | None) -> None:
        """Put a value where a row does not see a key, by `hidden` or by its position."""
        if hidden is not None:
            np.copyto(x, value, where=hidden)
        first, end = self._by_all
        if keys.stop > end:
            j = np.arange(max(keys.start, end), keys.stop)
            np.copyto(x[..., -len(j) :], value, where=j >= self._end[:, None])
        if keys.start < first:
            j = np.arange(keys.start, min(keys.stop, first))
            np.copyto(x[..., : len(j)], value, where=j < self._first[:, None])

    def kept(self, keys: slice) -> np.ndarray | None:
        """Return the factors by which a dropout multiplies a tile's weights; None without any."""
        dropout = self.problem.of(Dropout)
        return None if dropout is None else dropout.factors(self._at(keys))

    def product(
        self,
        weights: np.ndarray,
        values: np.ndarray,
        keys: slice,
        hidden: np.ndarray | None,
        out: np.ndarray | None = None,
        by_key: bool = False,
    ) -> np.ndarray:
        """Multiply weights by values; those of unseen keys do not count, even if infinite or NaN.

        Parameters
        ----------
        weights : ndarray, (*stacked, keys)
            0 where a key is unseen.
        values : ndarray, (batch, heads_kv, keys, ...), or (*stacked, ...) `by_key`
        keys : slice
        hidden : ndarray or None
            As `hidden` returns it.
        out : ndarray, optional
            Where the product goes.
        by_key : bool
            Whether to sum over rows: the transposed weights are multiplied.
        """
        if by_key:
            weights = weights.swapaxes(-1, -2)
        found: np.ndarray = np.matmul(weights, values, out=out)
        if self.are_seen(keys, hidden) or np.isfinite(found).all():
            return found
        everywhere = *self.by_head, keys.stop - keys.start
        unseen = np.broadcast_to(self.unseen(keys, hidden), everywhere)
        unseen = unseen.reshape(*self.stacked, everywhere[-1])
        if by_key:
            unseen = unseen.swapaxes(-1, -2)
        bad = ~np.isfinite(values).all(axis=-1)
        np.matmul(weights, np.where(bad[..., None], np.float32(0), values), out=found)
        for j in np.flatnonzero(bad.any(axis=(0, 1))):
            value = np.where(bad[:, :, j, None], values[:, :, j], np.float32(0))[:, :, None]
            weighted = weights[..., j, None] * value
            found += np.where(unseen[..., j, None], np.float32(0), weighted)
        return found
