"""Sinks: a logit of each head that takes part in the softmax and has no value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.features.feature import Call, Reading
from cufa.features.part import Part
from cufa.features.random_arrays import normal


@dataclass(frozen=True)
class Sinks(Reading):
    """A logit of each query head; the softmax of the oracles takes it, too."""

    ARGUMENT = "sinks"
    PARTS = (Part("Sinks", "sinks", decodes=True, axes="h", dtype="float32"),)

    @classmethod
    def random(cls, part: Part, call: Call, xp: Any, seed: int) -> Array:
        """Return a logit of each head."""
        return normal(xp, (call.heads_q,), np.dtype(part.dtype), seed)
