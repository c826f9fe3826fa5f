"""Dropout: which weights are dropped, by random bits that depend on nothing but their place.

The same as in ``kernels/philox.cuh`` and ``kernels/dropout.cuh``, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cufa.arrays import Array
from cufa.checks import check_module, check_real, check_seed, check_size
from cufa.features.feature import Call, Option, Tile, Value
from cufa.features.part import Parameter, Part

SEED = "dropout_seed"
"""The parameter that each launch is given, as it is given addresses."""

_NUMBERS = (
    Parameter(SEED, "u8"),
    Parameter("dropout_threshold", "u4"),
    Parameter("dropout_keep", "f4"),
)
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def check_dropout(dropout_p: object) -> float:
    """Return the share of the weights that is dropped."""
    value = check_real("dropout_p", dropout_p)
    if not 0 <= value < 1:  # also true for NaN
        raise ValueError(f"dropout_p must be 0 or more, and less than 1, not {value!r}")
    return value


def check_dropout_seed(seed: object, dropout_p: float) -> int:
    """Return the seed of a call's dropout as 64 bits; 0 where neither is given."""
    if seed is not None:
        return check_seed(seed)
    if 0 < dropout_p < 1:  # others are refused for what they are
        raise ValueError(
            "seed is needed with dropout_p: give each layer and step a seed of its own, or all of "
            "them drop the same weights"
        )
    return 0


@dataclass(frozen=True)
class Dropout(Value):
    """A dropout; its seed is no part of the problem.

    Attributes
    ----------
    p : float
        The share of the weights that is dropped.
    """

    p: float

    ARGUMENT = "dropout_p"
    DEFAULT = 0.0
    OPTION = Option("--dropout", "P", "the share of the weights that is dropped", float)
    PARTS = (Part("Dropout", "dropout_p", _NUMBERS),)

    @classmethod
    def parse(cls, given: object) -> Dropout | None:
        """Check the argument."""
        p = check_dropout(given)
        return cls(p) if p > 0 else None

    @property
    def words(self) -> str:
        """The words for it in a line about a problem."""
        return f"dropout {self.p:g}"

    @property
    def keep(self) -> float:
        """The share of the weights that is kept."""
        return 1 - threshold(self.p) / 2**32

    def numbers(self, call: Call) -> dict[str, float]:
        """Return below which of 2^32 numbers weights are dropped, and how many are kept."""
        return {"dropout_threshold": threshold(self.p), "dropout_keep": self.keep}

    def factors(self, tile: Tile) -> np.ndarray:
        """Return by what the weights of a tile are multiplied: 0 for those that are dropped."""
        batch, heads, queries = (np.arange(span.start, span.stop) for span in tile[:3])
        keeps = kept(self.p, tile.seed, batch, heads, queries, tile.keys, np)
        return np.where(keeps, np.float32(1 / self.keep), np.float32(0))


def threshold(dropout_p: float) -> int:
    """Return below which of 2^32 numbers a weight is dropped."""
    return min(round(dropout_p * 2**32), _LOW)


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    """Return four words of random bits for each counter: Philox4x32-10.

    Parameters
    ----------
    counter : tuple of array
        Four words, uint64 arrays of shapes that broadcast.
    seed : int
        64 bits.

    Notes
    -----
    Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.
    """
    a, b, c, d = counter
    key = [seed & _LOW, seed >> 32]
    for _ in range(_ROUNDS):
        first, second = a * np.uint64(_MULTIPLIERS[0]), c * np.uint64(_MULTIPLIERS[1])
        a, b, c, d = (
            (second >> np.uint64(32)) ^ b ^ np.uint64(key[0]),
            second & np.uint64(_LOW),
            (first >> np.uint64(32)) ^ d ^ np.uint64(key[1]),
            first & np.uint64(_LOW),
        )
        key = [(word + step) & _LOW for word, step in zip(key, _WEYL, strict=True)]
    return a, b, c, d


def kept(
    dropout_p: float, seed: int, batch: Array, heads: Array, queries: Array, keys: slice, xp: Any
) -> Array:
    """Return which weights are kept, (batch, heads, queries, keys).

    Parameters
    ----------
    dropout_p : float
    seed : int
    batch, heads, queries : array, 1-D
        Their numbers.
    keys : slice
    xp : module
        Module of the arrays.
    """
    # Four words are for the keys 16 a + 2 c + {0, 1, 8, 9}: those that a lane of a GPU holds.
    first, end = keys.start // 16, -(-keys.stop // 16)
    groups = xp.arange(4 * first, 4 * end, dtype=np.uint64)
    axes = [x.astype(np.uint64) for x in (batch, heads, queries)]
    b, h, q = axes[0][:, None, None, None], axes[1][:, None, None], axes[2][:, None]
    words = xp.stack(xp.broadcast_arrays(*philox((groups, q, h, b), seed)), axis=-1)
    of_sixteen = words.reshape(*words.shape[:3], end - first, 4, 2, 2)  # (..., a, c, 8s, 1s)
    in_order = of_sixteen.swapaxes(4, 5).reshape(*words.shape[:3], 16 * (end - first))
    found = in_order >= np.uint64(threshold(dropout_p))
    start = keys.start - 16 * first
    return found[..., start : start + keys.stop - keys.start]


def dropout_mask(
    shape: tuple[int, int, int, int], dropout_p: float, seed: int, *, xp: ModuleType = np
) -> Array:
    """Return which weights `cufa.attention` keeps with a dropout.

    Parameters
    ----------
    shape : tuple of int
        Batch, query heads, queries and keys.
    dropout_p : float
        The share of the weights that is dropped: 0 or more, and less than 1.
    seed : int
        0 to 2^64 - 1.
    xp : module
        numpy or cupy: where the array is made.

    Returns
    -------
    array of bool, (b, hq, sq, sk)
        True where a weight is kept.

    Raises
    ------
    TypeError, ValueError
        For arguments of other types or values.

    Notes
    -----
    The random numbers are Philox4x32-10 (Salmon et al. 2011) of batch, head, query and key.

    Examples
    --------
    >>> import cufa
    >>> kept = cufa.dropout_mask((1, 8, 100, 100), 0.1, seed=3)
    >>> bool(0.89 < kept.mean() < 0.91)
    True
    """
    check_module(xp)
    if not isinstance(shape, tuple) or len(shape) != 4:
        raise TypeError(f"shape must be a tuple (b, hq, sq, sk), not {shape!r}")
    b, h, q, k = (check_size("shape", n) for n in shape)
    batch, heads, queries = (xp.arange(n) for n in (b, h, q))
    bits = check_dropout(dropout_p), check_seed(seed)
    return kept(*bits, batch, heads, queries, slice(0, k), xp)
