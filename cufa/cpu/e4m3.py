"""Rounding of softmax weights to 8 bits: a sign, four bits of exponent, three of mantissa."""

from __future__ import annotations

import numpy as np

#: log2 of the weight of a row's largest score.
AT_MAX_LOG2 = 8

_LEAST_NORMAL = np.float32(2.0 ** (-6 - AT_MAX_LOG2))
_EXPONENT = np.uint32(0x7F800000)
#: Three bits of float32's mantissa remain.
_LOST = np.uint32(20 << 23)


def round_weights(rP: np.ndarray) -> None:
    """Round weights, 0 to 1, to e4m3 in place, as 2^8 times what they are; ties go to even.

    Notes
    -----
    Adding 1.5 * 2^20 times the power of two in a weight, and subtracting it again, leaves three
    bits of mantissa; the powers end where those of e4m3 do.
    """
    large = np.maximum(rP, _LEAST_NORMAL)
    bits = large.view(np.uint32)
    bits &= _EXPONENT
    bits += _LOST
    large *= np.float32(1.5)
    rP += large
    rP -= large
