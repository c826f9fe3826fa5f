"""The softmax of a tile of rows while tiles of keys pass by, without row maxima and with them."""

from __future__ import annotations

import functools

import numpy as np

#: Between these sums a row needs no maximum: float32 holds exp(score) as exactly as
#: exp(score - maximum), and what underflows is below 1e-31 of the sum.
_LEAST_SUM, _MOST_SUM = np.float32(2.0**-20), np.float32(2.0**100)

#: log2 of the weight of a row's largest score in 8 bits.
_AT_MAX_LOG2 = 8

_LEAST_NORMAL = np.float32(2.0 ** (-6 - _AT_MAX_LOG2))
_EXPONENT = np.uint32(0x7F800000)
#: So that three bits of float32's mantissa remain, as in e4m3.
_LOST = np.uint32(20 << 23)


@functools.lru_cache(maxsize=16)
def _ones(columns: int) -> np.ndarray:
    """Return a column of ones, which nobody writes to."""
    return np.ones((columns, 1), np.float32)


class PlainSoftmax:
    """The sums of a row's exp(score), and of these times values.

    This saves two passes over the scores, and is right for rows whose scores are of usual size.

    Parameters
    ----------
    stacked : tuple of int
        Sequences, K/V heads and rows.
    head_dim_v : int
        Elements of a value.

    Attributes
    ----------
    acc : ndarray, (*stacked, head_dim_v)
        Sum of weights times values.
    row_sum : ndarray, (*stacked, 1)
        Sum of weights.
    """

    def __init__(self, stacked: tuple[int, int, int], head_dim_v: int) -> None:
        self.acc = np.zeros((*stacked, head_dim_v), np.float32)
        self.row_sum = np.zeros((*stacked, 1), np.float32)

    def weigh(self, rS: np.ndarray) -> None:
        """Replace a tile of scores, in natural units, by their weights, and add up these."""
        np.exp(rS, out=rS)
        # A product takes a third of the time of NumPy's sum.
        self.row_sum += np.matmul(rS, _ones(rS.shape[-1]))

    def divided(self) -> np.ndarray:
        """Divide `acc` by the sums, in place, and return it: 0 of a row that has seen no key."""
        self.acc /= np.where(self.row_sum == 0, np.float32(1), self.row_sum)
        return self.acc

    @property
    def log_sum(self) -> np.ndarray:
        """Logarithm of the sum of the exponentials of a row's scores, not rounded to float32."""
        log_sum: np.ndarray = np.log(self.row_sum, dtype=np.float64)
        return log_sum

    @property
    def is_exact(self) -> np.ndarray:
        """Whether a row's sum is as exact as `OnlineSoftmax` would have it."""
        exact: np.ndarray = (self.row_sum >= _LEAST_SUM) & (self.row_sum <= _MOST_SUM)
        return exact


class OnlineSoftmax(PlainSoftmax):
    """The same with a running maximum m: sums are of exp(scale * (score - m)), for any scores.

    Parameters
    ----------
    stacked : tuple of int
    head_dim_v : int
        As in `PlainSoftmax`.
    scale : float32
        Positive.

    Attributes
    ----------
    m : ndarray, (*stacked, 1)
        The largest score of a row, not yet scaled.
    """

    def __init__(self, stacked: tuple[int, int, int], head_dim_v: int, scale: np.float32) -> None:
        super().__init__(stacked, head_dim_v)
        self.m = np.full((*stacked, 1), -np.inf, np.float32)
        self._scale = scale

    def weigh(self, rS: np.ndarray) -> None:
        """Replace a tile of scores, not yet scaled, by their weights, and add up these."""
        m_new = np.maximum(self.m, rS.max(axis=-1, keepdims=True))
        # A row that has seen no key keeps m = -inf; -inf - 0 avoids the NaN of -inf - (-inf).
        m_safe = np.where(m_new == -np.inf, np.float32(0), m_new)
        rS -= m_safe
        if self._scale != 1:
            rS *= self._scale  # not before: a scaled Q, or scores, may not fit float32
        rescale = np.exp((self.m - m_safe) * self._scale)
        self.m = m_new
        self.row_sum *= rescale
        self.acc *= rescale
        super().weigh(rS)

    @property
    def log_sum(self) -> np.ndarray:
        """Logarithm of the sum of the exponentials of a row's scores."""
        return self.m * np.float64(self._scale) + super().log_sum


class Fp8Softmax(OnlineSoftmax):
    """The same with weights that are rounded to 8 bits before they meet V; their sum is not.

    Notes
    -----
    Weights are rounded as 2^8 times what they are, relative to the largest score of a row so far:
    none is larger than 256, of the 448 that e4m3 holds, and they lose bits below 2^-14 only.
    """

    def weigh(self, rS: np.ndarray) -> None:
        """Replace a tile of scores, not yet scaled, by their weights, and add up these."""
        super().weigh(rS)
        round_weights(rS)


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
