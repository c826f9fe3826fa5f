"""The features of a call on the CPU, between Q K^T and the softmax, tile by tile."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cufa.cpu.functions import Functions
from cufa.features.dropout import Dropout
from cufa.features.feature import Feature, Tile
from cufa.features.sinks import Sinks
from cufa.problem.problem import Problem


class Score:
    """The score of a tile of queries: the queries of all heads of a group, head by head.

    Parameters
    ----------
    problem : Problem
    rows : slice
        The queries.
    stacked : tuple of int
        Sequences, K/V heads, and rows of all heads of a group: the shape of their scores, but for
        the keys.
    score_arrays : mapping
        Arrays of these sequences and query heads, by argument, with all axes of their parts.
    functions : Functions
        The caller's functions, of these sequences and query heads.
    seed : int
        The seed of a dropout.

    Attributes
    ----------
    problem, rows, stacked, functions
        As given.
    is_more_than_scaled : bool
        Whether `apply` is to be called, which brings scores to natural units.
    """

    def __init__(
        self,
        problem: Problem,
        rows: slice,
        stacked: tuple[int, int, int],
        score_arrays: Mapping[str, np.ndarray],
        functions: Functions,
        seed: int,
    ) -> None:
        self.problem, self.rows, self.stacked, self.functions = problem, rows, stacked, functions
        diagonal = problem.seq_kv - problem.seq_q
        self._all = Tile(rows, slice(0, 0), stacked, diagonal, score_arrays, seed)
        features = problem.features
        self._hiding = [f for f in features if type(f).hidden is not Feature.hidden]
        self._dropping = [f for f in features if type(f).drop is not Feature.drop]
        changes = any(feature.CHANGES for feature in features)
        self.is_more_than_scaled = changes or functions.score_mod is not None

    def _tile(self, keys: slice) -> Tile:
        return self._all._replace(keys=keys)

    def apply(self, rS: np.ndarray, scale: np.floating, keys: slice) -> None:
        """Make Q K^T the scores, in place, of the keys of a tile."""
        tile = self._tile(keys)
        for feature in self.problem.features:
            scale = feature.apply(rS, scale, tile)
        if scale != 1:
            rS *= scale
        self.functions.apply(self._by_head(rS), self.rows, keys)

    def slopes(
        self, rS: np.ndarray, scale: np.floating, keys: slice
    ) -> list[tuple[str, np.ndarray | None]]:
        """Do the same; return also the derivative that each feature has, by argument, in order."""
        tile = self._tile(keys)
        found: list[tuple[str, np.ndarray | None]] = []
        for feature in self.problem.features:
            scale, slope = feature.differentiated(rS, scale, tile)
            found.append((feature.ARGUMENT, slope))
        if scale != 1:
            rS *= scale
        by_head = self._by_head(rS)
        if self.functions.score_mod is not None:
            if self.functions.partials:
                self._before = by_head.copy()
            slope = self.functions.slope(by_head, self.rows, keys)
            found.append(("score_mod", None if slope is None else slope.reshape(rS.shape)))
            self.functions.apply(by_head, self.rows, keys)
        return found

    def gather(self, rdS: np.ndarray, keys: slice, into: Mapping[str, np.ndarray]) -> None:
        """Add gradients of arrays that `score_mod` reads, from that of the scores of `slopes`."""
        self.functions.gather(self._by_head(rdS), self._before, self.rows, keys, into)

    def _by_head(self, rS: np.ndarray) -> np.ndarray:
        """Return scores with an axis of query heads."""
        batch, heads_kv, _ = self.stacked
        return rS.reshape(batch, heads_kv * self.problem.group, -1, rS.shape[-1])

    def hidden(self, keys: slice) -> np.ndarray | None:
        """Return where arrays or `mask_mod` hide keys of a tile, in the scores' shape, or None."""
        hidden: np.ndarray | None = None
        for feature in self._hiding:
            more = feature.hidden(self._tile(keys))
            if more is not None:
                hidden = more if hidden is None else hidden | more
        seen = self.functions.seen(self.rows, keys)
        if seen is None:
            return hidden
        by_function = ~seen.reshape(*self.stacked, seen.shape[-1])
        return by_function if hidden is None else by_function | hidden

    def drop(self, rP: np.ndarray, keys: slice) -> None:
        """Set the dropped weights of a tile to 0."""
        for feature in self._dropping:
            feature.drop(rP, self._tile(keys))

    def kept(self, keys: slice) -> np.ndarray | None:
        """Return the factors by which a dropout multiplies a tile's weights; None without any."""
        dropout = self.problem.of(Dropout)
        if dropout is None:
            return None
        shape = (*self.stacked, keys.stop - keys.start)
        found = np.full(shape, 1 / dropout.keep, np.float32)
        dropout.drop(found, self._tile(keys))
        return found

    def sinks(self) -> np.ndarray | None:
        """Return the logit that each row has besides its keys, (..., rows, 1); None without any."""
        sinks = self.problem.of(Sinks)
        return None if sinks is None else sinks.of_rows(self._all)
