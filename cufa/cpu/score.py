"""What stands between Q K^T and the softmax on the CPU: the parts of a score on NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cufa.cpu.own import Own
from cufa.features.dropout import kept
from cufa.problem.problem import Problem


class Score:
    """The score of a tile of queries: of those of all heads of a group, head by head.

    Parameters
    ----------
    problem : Problem
    rows : slice
        The queries.
    stacked : tuple of int
        Sequences, K/V heads, and rows of all heads of a group: the shape of their scores, but for
        the keys.
    beside : mapping
        Arrays of these sequences and query heads, by argument, with all axes of their parts.
    own : Own
        The caller's functions, of these sequences and query heads.
    seed : int
        Of a dropout.

    Attributes
    ----------
    is_more_than_scaled : bool
        Whether `apply` is to be called, which brings scores to natural units.
    """

    def __init__(
        self,
        problem: Problem,
        rows: slice,
        stacked: tuple[int, int, int],
        beside: Mapping[str, np.ndarray],
        own: Own,
        seed: int,
    ) -> None:
        self._problem, self._rows, self._stacked, self._beside = problem, rows, stacked, beside
        self._own, self._seed = own, seed
        changes = not beside.keys().isdisjoint(("alibi_slopes", "bias"))
        self.is_more_than_scaled = bool(problem.softcap or own.score_mod) or changes

    def apply(self, rS: np.ndarray, scale: np.floating, keys: slice) -> None:
        """Make Q K^T the scores, in place, of the keys of a tile."""
        if self._problem.softcap:
            rS *= scale / np.float32(self._problem.softcap)
            np.tanh(rS, out=rS)
            rS *= np.float32(self._problem.softcap)
        else:
            rS *= scale
        if "alibi_slopes" in self._beside:
            slopes = self._beside["alibi_slopes"].reshape(*self._stacked[:2], -1, 1, 1)
            by_head = rS.reshape(*slopes.shape[:3], -1, rS.shape[-1])
            by_head -= slopes * self._distances(keys)
        if "bias" in self._beside:
            rS += self._of_pairs(self._beside["bias"], keys)
        batch, heads_kv, _ = self._stacked
        shape = (batch, heads_kv * self._problem.group, -1, rS.shape[-1])
        self._own.apply(rS.reshape(shape), self._rows, keys)

    def hidden(self, keys: slice) -> np.ndarray | None:
        """Return where `mask` or `mask_mod` hides keys of a tile, in the scores' shape, or None."""
        by_mask, seen = self._hidden_by_mask(keys), self._own.seen(self._rows, keys)
        if seen is None:
            return by_mask
        hidden = ~seen.reshape(*self._stacked, seen.shape[-1])
        return hidden if by_mask is None else hidden | by_mask

    def _hidden_by_mask(self, keys: slice) -> np.ndarray | None:
        if "mask" not in self._beside:
            return None
        mask = self._beside["mask"]
        if mask.dtype == np.bool_:
            return ~self._of_pairs(mask, keys)
        first = keys.start // 8
        bits = self._of_pairs(mask, slice(first, -(-keys.stop // 8)))
        seen = np.unpackbits(bits, axis=-1)[..., keys.start - 8 * first :]
        return seen[..., : keys.stop - keys.start] == 0

    def drop(self, rP: np.ndarray, keys: slice) -> None:
        """Set those of a tile's weights to 0 that are dropped."""
        if not self._problem.dropout_p:
            return
        of_heads, rows = self._beside["numbers"], self._rows
        for i, of_sequence in enumerate(of_heads):
            keeps = kept(
                *(self._problem.dropout_p, self._seed, of_sequence[:1, 0], of_sequence[:, 1]),
                *(np.arange(rows.start, rows.stop), keys, np),
            )
            rP[i] *= keeps.reshape(rP[i].shape)

    def sinks(self) -> np.ndarray | None:
        """Return the logit that each row has beside its keys, (..., rows, 1); None without any."""
        if "sinks" not in self._beside:
            return None
        of_rows = np.repeat(self._beside["sinks"], self._rows.stop - self._rows.start)
        return of_rows.reshape(self._stacked[1:])[..., None]

    def _distances(self, keys: slice) -> np.ndarray:
        stand = np.arange(self._rows.start, self._rows.stop)
        stand += self._problem.seq_kv - self._problem.seq_q
        return np.abs(stand[:, None] - np.arange(keys.start, keys.stop)).astype(np.float32)

    def _of_pairs(self, array: np.ndarray, columns: slice) -> np.ndarray:
        """Return the rows' part of a (batch, query heads, queries, columns) array."""
        part = array[:, :, self._rows, columns]
        return part.reshape(*self._stacked, part.shape[-1])
