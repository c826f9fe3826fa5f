"""A caller's own functions: `score_mod`, `mask_mod`, and which tiles a `block_mask` leaves out.

`cufa.features.expression` makes parts of them for the GPU; on NumPy arrays they are called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.features.feature import Places, Reading
from cufa.features.part import Part

BLOCKS = "Blocks"
"""The part that reads the lists of `cufa.BlockMask`."""

OWN = {"score_mod": "ScoreMod", "mask_mod": "MaskMod"}
"""The beginnings of the names of a caller's own parts, by argument."""


@dataclass(frozen=True)
class ScoreMod(Reading):
    """A function of a score and its place; the part was made of it."""

    ARGUMENT = "score_mod"

    @staticmethod
    def changed(given: Any, scores: Array, at: Places, xp: Any) -> Array:
        """Return what the function says."""
        with np.errstate(invalid="ignore"):
            changed = xp.asarray(given(scores, at.b, at.h, at.i, at.j), scores.dtype.type)
        return xp.broadcast_to(changed, scores.shape)


@dataclass(frozen=True)
class MaskMod(Reading):
    """A function that says which query sees which key; the part was made of it."""

    ARGUMENT = "mask_mod"

    @staticmethod
    def hides(given: Any, at: Places, xp: Any) -> Array | None:
        """Return where the function does not say true."""
        return xp.logical_not(given(at.b, at.h, at.i, at.j))


@dataclass(frozen=True)
class Blocks(Reading):
    """Lists of the tiles that a `mask_mod` lets queries see."""

    part: str = BLOCKS

    ARGUMENT = "block_mask"
    PARTS = (Part(BLOCKS, "block_mask", axes="bh", dtype="int32"),)
