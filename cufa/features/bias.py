"""A bias: an array that is added to the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cufa.arrays import Array
from cufa.features.feature import Call, Places, Reading, Tile
from cufa.features.part import Part
from cufa.features.random_arrays import normal


@dataclass(frozen=True)
class Bias(Reading):
    """A number for each pair of a query and a key."""

    ARGUMENT: ClassVar[str] = "bias"
    CHANGES: ClassVar[bool] = True
    PARTS: ClassVar[tuple[Part, ...]] = tuple(
        Part(f"Bias{dtype.capitalize()}", "bias", axes="bhqk", dtype=dtype)
        for dtype in ("float16", "bfloat16", "float32")
    )

    def apply(self, rS: np.ndarray, factor: np.floating, tile: Tile) -> np.floating:
        """Add the bias."""
        rS *= factor
        rS += tile.pairs("bias")
        return np.float32(1)

    @staticmethod
    def changed(given: Any, scores: Array, at: Places, xp: Any) -> Array:
        """Return the sum of both."""
        return scores + given.astype(scores.dtype.type)

    @classmethod
    def random(cls, part: Part, call: Call, xp: Any, seed: int) -> Array:
        """Return a bias of each head."""
        shape = (1, call.heads_q, call.seq_q, call.seq_kv)
        return normal(xp, shape, np.dtype(part.dtype), seed)
