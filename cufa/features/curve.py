"""The polynomial that takes the place of bfloat16's c tanh(score / c)."""

from __future__ import annotations

import math
from typing import NamedTuple

_TANH = 0.9997853637, -0.3262980283, 0.0973573104
"""Factors of x, x^3 and x^5: tanh(x) to 2^-12 of x, for |x| <= 3/4."""

_TANH_END = 0.635148952  # tanh(3/4)

_LEAST, _MOST = 2.0**-12, 2.0**12
"""Bounds of scale / c: powers of other values would leave float32's range."""


class Curve(NamedTuple):
    """c tanh(scale S / c), log2 units, as S ((root S^2 + middle)^2 + rest).

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
    if not _LEAST < factor < _MOST:
        return Curve()
    softcap_log2 = softcap * math.log2(math.e)
    first, third, fifth = (
        term * softcap_log2 * factor**power for term, power in zip(_TANH, (1, 3, 5), strict=True)
    )
    root = math.sqrt(fifth)
    middle = third / (2 * root)
    return Curve(root, middle, first - middle**2, _TANH_END * softcap_log2)
