"""A softcap: c tanh(score / c) takes the place of a score."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Array
from cufa.checks import check_real
from cufa.dtypes import DTYPES
from cufa.features.feature import Call, Option, Places, Tile, Value
from cufa.features.part import Parameter, Part

#: Beyond, what float16's tanh leaves of a score, 2^-23 of the softcap, would show in the result.
_LEAST, _MOST = 1e-6, 1e4

_TANH = 0.9997853637, -0.3262980283, 0.0973573104
"""Factors of x, x^3 and x^5: tanh(x) to 2^-12 of x, for |x| <= 3/4."""

_TANH_END = 0.635148952  # tanh(3/4)

_LEAST_FACTOR, _MOST_FACTOR = 2.0**-12, 2.0**12
"""Bounds of scale / c: powers of other values would leave float32's range."""


class Curve(NamedTuple):
    """bfloat16's c tanh(scale S / c), log2 units, as S ((root S^2 + middle)^2 + rest).

    As a square it takes the kernels fewer registers than term by term, as ``Square`` of
    ``kernels/softcap.cuh`` says.

    Attributes
    ----------
    root, middle, rest : float
    end : float
        The magnitude up to which it is right; 0 for nowhere.
    """

    root: float = 0.0
    middle: float = 0.0
    rest: float = 0.0
    end: float = 0.0


def curve(scale: float, softcap: float) -> Curve:
    """Return the curve of a scale and a softcap c, natural units.

    Parameters
    ----------
    scale : float
        Not negative.
    softcap : float
        Positive.
    """
    factor = scale / softcap
    if not _LEAST_FACTOR < factor < _MOST_FACTOR:
        return Curve()
    softcap_log2 = softcap * math.log2(math.e)
    first, third, fifth = (
        term * softcap_log2 * factor**power for term, power in zip(_TANH, (1, 3, 5), strict=True)
    )
    root = math.sqrt(fifth)
    middle = third / (2 * root)
    return Curve(root, middle, first - middle**2, _TANH_END * softcap_log2)


_NUMBERS = Parameter("softcap_log2", "f4"), Parameter("softcap_inverse", "f4")
_CURVE = tuple(Parameter(f"softcap_{name}", "f4") for name in Curve._fields)


@dataclass(frozen=True)
class Softcap(Value):
    """A softcap.

    Attributes
    ----------
    c : float
        The bound of the scores.
    """

    c: float

    ARGUMENT = "softcap"
    CHANGES = True
    OPTION = Option("--softcap", "C", "bound of the scores, by tanh", float)
    PARTS = (
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
