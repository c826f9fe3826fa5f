"""Sinks: a logit of each head that takes part in the softmax and has no value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cufa.arrays import Array
from cufa.features.feature import Call, Reading, Tile
from cufa.features.part import Part
from cufa.features.random_arrays import normal


@dataclass(frozen=True)
class Sinks(Reading):
    """A logit of each query head; the softmax of the oracles takes it, too."""

    ARGUMENT: ClassVar[str] = "sinks"
    PARTS: ClassVar[tuple[Part, ...]] = (
        Part("Sinks", "sinks", decodes=True, axes="h", dtype="float32"),
    )

    @staticmethod
    def of_rows(tile: Tile) -> np.ndarray:
        """Return the logit of each row, (..., rows, 1)."""
        of_rows = np.repeat(tile.arrays["sinks"], tile.rows.stop - tile.rows.start)
        return of_rows.reshape(tile.stacked[1:])[..., None]

    @classmethod
    def random(cls, part: Part, call: Call, xp: Any, seed: int) -> Array:
        """Return a logit of each head."""
        return normal(xp, (call.heads_q,), np.dtype(part.dtype), seed)
