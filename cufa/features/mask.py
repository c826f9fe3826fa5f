"""A mask: an array that says which query sees which key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.features.feature import Call, Places, Reading, Tile
from cufa.features.part import Part
from cufa.features.random_arrays import mostly


@dataclass(frozen=True)
class Mask(Reading):
    """A truth value for each pair of a query and a key, or eight in a byte."""

    ARGUMENT = "mask"
    PARTS = (
        Part("Mask", "mask", axes="bhqk", dtype="bool"),
        Part("MaskBits", "mask", axes="bhqk", dtype="uint8"),
    )

    def hidden(self, tile: Tile) -> np.ndarray | None:
        """Return where the mask is not true."""
        mask, keys = tile.arrays["mask"][:, :, tile.rows], tile.keys
        if mask.dtype == np.uint8:
            first = keys.start // 8
            mask = np.unpackbits(mask[..., first : -(-keys.stop // 8)], axis=-1)
            keys = slice(keys.start - 8 * first, keys.stop - 8 * first)
        return np.logical_not(mask[..., keys])

    @staticmethod
    def hides(given: Any, at: Places, xp: Any) -> Array | None:
        """Return where the mask is not true; the first key of eight has the highest bit."""
        if given.dtype == np.uint8:
            j = xp.arange(at.seq_kv)
            given = (given[..., j // 8] >> (7 - j % 8).astype(np.uint8)) & 1 != 0
        return xp.logical_not(given)

    @classmethod
    def random(cls, part: Part, call: Call, xp: Any, seed: int) -> Array:
        """Return a mask of each sequence, mostly true."""
        columns = -(-call.seq_kv // 8) if part.dtype == "uint8" else call.seq_kv
        return mostly(xp, (call.batch, 1, call.seq_q, columns), np.dtype(part.dtype), seed)
