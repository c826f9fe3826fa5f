"""Incoherent processing: random signs and a Hadamard transform along the head dimension.

An outlier in one column is spread over all of them, so that fewer bits hold a row well. The
transform is orthonormal: products of rows stay as they are if both have been transformed
(Shah et al. 2024, section 3.3).
"""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from cufa.arrays import Array
from cufa.features.dropout import philox

COLUMNS = 64, 96, 128, 192, 256
"""Lengths of stored rows: those of other head dims end with zeros."""


def columns_of(head_dim: int) -> int:
    """Return how long the stored rows of a head dim are."""
    return next(n for n in COLUMNS if n >= head_dim)


def together(columns: int) -> int:
    """Return how many columns are transformed together: 64 of 192, 32 of 96, or all."""
    return columns & -columns


@functools.lru_cache(64)  # Philox takes the host longer than a launch
def sign_bits(seed: int, columns: int) -> np.ndarray:
    """Return words with a bit for each column, from the lowest on: set where the sign changes.

    Notes
    -----
    They are what Philox4x32-10 has for the counters (0, 0, 0, 0) and (1, 0, 0, 0).
    """
    counter = np.arange(2, dtype=np.uint64)
    zero = np.zeros_like(counter)
    words = np.stack(philox((counter, zero, zero, zero), seed), axis=-1)
    found: np.ndarray = words.ravel()[: columns // 32].astype(np.uint32)
    found.flags.writeable = False  # all callers have the same array
    return found


def signs(seed: int, columns: int) -> np.ndarray:
    """Return a sign for each column, float32."""
    bits = sign_bits(seed, columns)[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    found: np.ndarray = np.where(bits.ravel() == 1, np.float32(-1), np.float32(1))
    return found


def norm(columns: int) -> np.float32:
    """Return by what `sums` are multiplied, so that the transform is orthonormal."""
    return np.float32(together(columns) ** -0.5)


def sums(x: Array, seed: int, xp: ModuleType) -> Array:
    """Return the sums and differences of rows that the transform consists of, before the norm.

    Parameters
    ----------
    x : array of float32, (..., columns)
    seed : int
        The seed of the signs.
    xp : module
        The module that `x` belongs to.
    """
    return _sums(x * xp.asarray(signs(seed, x.shape[-1])), xp)


def transformed(x: Array, seed: int, xp: ModuleType) -> Array:
    """Return rows after the signs and the transform; the parameters are those of `sums`."""
    return sums(x, seed, xp) * norm(x.shape[-1])


def restored(y: Array, seed: int, xp: ModuleType) -> Array:
    """Return rows as they were before `transformed`, but for rounding."""
    columns = y.shape[-1]
    return _sums(y, xp) * norm(columns) * xp.asarray(signs(seed, columns))


def _sums(x: Array, xp: ModuleType) -> Array:
    """Add and subtract columns; stage by stage, as kernels do, and with their rounding."""
    columns = x.shape[-1]
    n = together(columns)
    step = 1
    while step < n:
        pairs = x.reshape(*x.shape[:-1], columns // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = xp.stack((a + b, a - b), axis=-2).reshape(x.shape)
        step *= 2
    return x + np.float32(0)  # no -0, which signs make of zeros
