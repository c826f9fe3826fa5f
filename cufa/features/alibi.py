"""ALiBi: scores fall with the distance between query and key (Press et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.features.feature import Call, Places, Reading, Tile
from cufa.features.part import Part


@dataclass(frozen=True)
class Alibi(Reading):
    """Slopes of the heads."""

    ARGUMENT = "alibi_slopes"
    CHANGES = True
    PARTS = (Part("Alibi", "alibi_slopes", decodes=True, axes="bh", dtype="float32"),)

    def apply(self, rS: np.ndarray, factor: np.floating, tile: Tile) -> np.floating:
        """Subtract the slopes times the distances."""
        rS *= factor
        _, _, i, j = tile.numbers
        slopes = tile.arrays["alibi_slopes"][..., None, None]
        rS -= slopes * np.abs(i + tile.diagonal - j).astype(np.float32)
        return np.float32(1)

    @staticmethod
    def changed(given: Any, scores: Array, at: Places, xp: Any) -> Array:
        """Return scores less the slopes times the distances."""
        number = scores.dtype.type
        return scores - given.astype(number) * xp.abs(at.ahead).astype(number)

    @classmethod
    def random(cls, part: Part, call: Call, xp: Any, seed: int) -> Array:
        """Return the slopes of the paper's section 3."""
        heads = np.arange(1, call.heads_q + 1, dtype=np.float32)
        return xp.asarray(np.exp2(-8 * heads / max(1, call.heads_q), dtype=np.float32))
