"""A softcap: c tanh(score / c) takes the place of a score."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cufa.arrays import Array
from cufa.checks import check_real
from cufa.dtypes import DTYPES
from cufa.features.curve import curve
from cufa.features.feature import Call, Option, Places, Tile, Value
from cufa.features.part import Parameter, Part

#: Beyond, what float16's tanh leaves of a score, 2^-23 of the softcap, would show in the result.
_LEAST, _MOST = 1e-6, 1e4

_NUMBERS = Parameter("softcap_log2", "f4"), Parameter("softcap_inverse", "f4")
_CURVE = tuple(Parameter(f"softcap_{name}", "f4") for name in ("root", "middle", "rest", "end"))


@dataclass(frozen=True)
class Softcap(Value):
    """A softcap.

    Attributes
    ----------
    c : float
        The bound of the scores.
    """

    c: float

    ARGUMENT: ClassVar[str] = "softcap"
    CHANGES: ClassVar[bool] = True
    OPTION: ClassVar[Option | None] = Option(
        "--softcap", "C", "bound of the scores, by tanh", float
    )
    PARTS: ClassVar[tuple[Part, ...]] = (
        Part("Softcap", "softcap", (*_NUMBERS, *_CURVE), decodes=True),
        Part("FineSoftcap", "softcap", _NUMBERS, decodes=True),
        Part("ExactSoftcap", "softcap", _NUMBERS, decodes=True),
    )

    @classmethod
    def parse(cls, given: object) -> Softcap | None:
        """Check the argument."""
        value = check_real("softcap", given, "a real number or None")
        if not _LEAST <= value <= _MOST:  # also true for NaN
            raise ValueError(
                f"softcap must be {_LEAST:g} to {_MOST:g}, or None for none (flash-attn's 0), not "
                f"{value!r}"
            )
        return cls(value)

    @property
    def words(self) -> str:
        """The words for it in a line about a problem."""
        return f"softcap {self.c:g}"

    def parts(self, call: Call) -> tuple[str, ...]:
        """Return the part that is as accurate as the call needs.

        In 8 bits it is none that knows the scale: each block of keys has another one.
        """
        is_fine = call.returns_lse or call.precision is not None
        return (DTYPES[call.dtype].softcap_part(is_fine),)

    def numbers(self, call: Call) -> dict[str, float]:
        """Return the bound in log2 units, its reciprocal, and the numbers of its curve."""
        c = self.c * math.log2(math.e)
        found = {"softcap_log2": c, "softcap_inverse": 1 / c}
        numbers = curve(call.scale, self.c)._asdict().items()
        return found | {f"softcap_{name}": number for name, number in numbers}

    def apply(self, rS: np.ndarray, factor: np.floating, tile: Tile) -> np.floating:
        """Bound the scores of a tile."""
        rS *= factor / np.float32(self.c)
        np.tanh(rS, out=rS)
        rS *= np.float32(self.c)
        return np.float32(1)

    def slope(self, scores: np.ndarray) -> np.ndarray | None:
        """Return 1 - tanh^2."""
        c = np.float32(self.c)
        return (c - scores) * (c + scores) / np.square(c)  # near 0, too, where scores are near c

    @staticmethod
    def changed(given: Any, scores: Array, at: Places, xp: Any) -> Array:
        """Return bounded scores."""
        number = scores.dtype.type
        return number(given) * xp.tanh(scores / number(given))
