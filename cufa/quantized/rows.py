"""Rows of 8-bit numbers with a scale each, as caches hold keys and values."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np

from cufa.arrays import Array
from cufa.quantized.e4m3 import E4M3, LARGEST, expanded, rounded

MEAN_TOKENS = 256
"""Tokens whose mean is taken off keys, the first ones of a sequence, at most."""

#: A larger mean counts as 0: a finite number less it could be infinite.
MOST_MEAN = np.float32(2.0**102)

#: The least scale, 2^-126: its reciprocal is finite.
_LEAST = np.finfo(np.float32).tiny
#: The largest scale, of which 127 are finite.
_MOST = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


class Kind(NamedTuple):
    """A kind of 8-bit numbers.

    Attributes
    ----------
    name : str
    on_host, on_device : numpy.dtype
        The dtypes of NumPy and of CuPy arrays.
    largest : numpy.float32
        The number that the largest of a row becomes.
    """

    name: str
    on_host: np.dtype
    on_device: np.dtype
    largest: np.float32

    @property
    def is_integer(self) -> bool:
        """Whether they are integers, of which none is NaN."""
        return self.on_host.kind == "i"


KINDS = {
    "fp8": Kind("fp8", E4M3, np.dtype(np.uint8), LARGEST),
    "int8": Kind("int8", np.dtype(np.int8), np.dtype(np.int8), np.float32(127)),
}
"""The kinds by name."""


def kind_of(values: Array) -> Kind:
    """Return the kind of an array of bytes."""
    return KINDS["int8" if values.dtype == np.int8 else "fp8"]


def scale_of(largest: np.ndarray, most: np.float32, factor: np.float32 | int = 1) -> np.ndarray:
    """Return by what numbers times a factor are divided, so that the largest becomes `most`."""
    return np.where(largest == 0, np.float32(1), np.clip(largest * factor / most, _LEAST, _MOST))


def quantized_rows(x: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Return rows as bytes, and a scale for each.

    Parameters
    ----------
    x : ndarray of float32, (..., columns)
    kind : Kind

    Returns
    -------
    values : ndarray, (..., columns)
    scales : ndarray of float32, (...)
        1 for a row of zeros. NaN for a row of integers of which one is not finite.
    """
    with np.errstate(all="ignore"):  # infinities and NaN become NaN
        finite = np.isfinite(x)
        largest = np.where(finite, np.abs(x), np.float32(0)).max(axis=-1, initial=0)
        scales = scale_of(largest, kind.largest)
        y = x * (1 / scales)[..., None]
        if not kind.is_integer:
            return rounded(y), scales
        whole = finite.all(axis=-1)
        values = np.where(whole[..., None], np.rint(y), 0).astype(np.int8)
        return values, np.where(whole, scales, np.float32(np.nan))


def numbers_of(values: Array, scales: Array, xp: ModuleType) -> Array:
    """Return what rows stand for, float32.

    Parameters
    ----------
    values : array, (..., columns)
        Bytes.
    scales : array of float32, (...)
    xp : module
        The module that they belong to.
    """
    numbers = values.astype(np.float32) if kind_of(values).is_integer else expanded(values, xp)
    return numbers * scales[..., None]


def mean_of(rows: np.ndarray) -> np.ndarray:
    """Return the mean of finite numbers, (..., rows, columns) -> (..., columns); 0 if none is."""
    rows = np.ascontiguousarray(rows)  # NumPy adds up in the order that strides suggest
    finite = np.isfinite(rows)
    with np.errstate(all="ignore"):
        sums = np.where(finite, rows, np.float32(0)).sum(axis=-2, dtype=np.float32)
        found = sums / np.maximum(finite.sum(axis=-2), 1).astype(np.float32)
    return np.where(np.abs(found) < MOST_MEAN, found, np.float32(0))
