"""Causal masks: no query sees a key after its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.features.feature import Bound, Call, Places, Reach, Value
from cufa.features.part import Part

CAUSAL = ("bottom-right", "top-left")
"""Which corners of the scores a causal mask's diagonal may end in; True is the first."""

_NEEDED = f"True, False, {CAUSAL[0]!r} or {CAUSAL[1]!r}"


@dataclass(frozen=True)
class Causal(Value):
    """A causal mask.

    Attributes
    ----------
    corner : str
        One of `CAUSAL`: query i sees the keys j <= i + seq_kv - seq_q, or those of j <= i.
    """

    corner: str = CAUSAL[0]

    ARGUMENT = "causal"
    DEFAULT = False
    PARTS = (
        Part("Causal", "causal", right_edge=True, decodes=True),
        Part("TopLeft", "causal", right_edge=True),
    )

    @classmethod
    def parse(cls, given: object) -> Causal | None:
        """Check the argument."""
        if isinstance(given, str):
            if given not in CAUSAL:
                raise ValueError(f"causal must be {_NEEDED}, not {given!r}")
            return cls(given)
        if not isinstance(given, (bool, np.bool_)):
            raise TypeError(f"causal must be {_NEEDED}, not {type(given).__name__}")
        return cls() if given else None

    @property
    def words(self) -> str:
        """The words for it in a line about a problem."""
        return "causal top-left" if self.is_top_left else "causal"

    @property
    def is_top_left(self) -> bool:
        """Whether query i stands at key i."""
        return self.corner == CAUSAL[1]

    def parts(self, call: Call) -> tuple[str, ...]:
        """Return its part; in a cache, one query sees all keys."""
        if self.is_top_left:
            return ("TopLeft",)
        return () if call.is_cached and call.seq_q == 1 else ("Causal",)

    def sees(self, i: Any, stands: Any) -> tuple[Bound, Bound]:
        """Return the end of the keys that queries see."""
        return (None, i + 1) if self.is_top_left else super().sees(i, stands)

    @property
    def reach(self) -> Reach:
        """How far queries see."""
        return Reach() if self.is_top_left else Reach(right=0)

    @staticmethod
    def hides(given: Any, at: Places, xp: Any) -> Array | None:
        """Return where a key is after the query's own."""
        if not given:
            return None
        return at.j > at.i if given == "top-left" else at.ahead > 0
