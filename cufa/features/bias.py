"""A bias: an array that is added to the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.dtypes import DTYPES
from cufa.features.feature import Call, Places, Reading, Tile
from cufa.features.part import Parameter, Part
from cufa.features.random_arrays import normal


@dataclass(frozen=True)
class Bias(Reading):
    """A number for each pair of a query and a key."""

    ARGUMENT = "bias"
    CHANGES = True
    PARTS = tuple(
        Part(f"Bias{dtype.capitalize()}", "bias", axes="bhqk", dtype=dtype)
        for dtype in ("float16", "bfloat16", "float32")
    )

    def apply(self, rS: np.ndarray, factor: np.floating, tile: Tile) -> np.floating:
        """Add the bias."""
        rS *= factor
        rS += tile.arrays["bias"][:, :, tile.rows, tile.keys]
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


SUMS = "bias_sums"
"""The parameter that is the address of the sums of a bias's gradient."""


def in_sums(part: Part, by_query: bool, by_key: bool) -> Part:
    """Return the part that adds up the gradient of a bias, too: see ``kernels/bias_sums.cuh``.

    Parameters
    ----------
    part : Part
        The one that reads it.
    by_query, by_key : bool
        Whether its sums have an axis of queries, and one of keys.
    """
    arguments = DTYPES[part.dtype].cpp, *(str(x).lower() for x in (by_query, by_key))
    strides = (Parameter(f"{SUMS}_stride_{axis}", "i8") for axis in part.axes)
    return part._replace(
        name=f"BiasInSums<{', '.join(arguments)}>", parameters=(Parameter(SUMS, "u8"), *strides)
    )
