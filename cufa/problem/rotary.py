"""Rotary position embedding: the cosines and sines that turn queries and keys."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np

from cufa.arrays import Array, check_unmasked, module_of_all
from cufa.checks import as_float, check_flag, check_module, check_size, shown_dtype
from cufa.dtypes import DTYPES


class Rotary:
    """Tables of rotary position embedding, which a cache applies to what is written to it.

    Elements of a head are turned in pairs, as points of a plane, by an angle that grows with the
    token's position: (x, y) becomes (x cos - y sin, y cos + x sin).

    Parameters
    ----------
    cos, sin : array, shape (positions, rotary_dim / 2)
        Of the angles of each position and pair; they become float32. NumPy or CuPy, as the arrays
        that are turned. The first `rotary_dim` elements of a head are turned, the others stay.
    interleaved : bool
        Pairs are elements 2 i and 2 i + 1, as in GPT-J and in Llama's own checkpoints; else i and
        i + rotary_dim / 2, as in GPT-NeoX and in Hugging Face's checkpoints.

    Attributes
    ----------
    cos, sin : array, shape (positions, rotary_dim / 2)
        float32.
    interleaved : bool

    Raises
    ------
    TypeError
        Tables that are no arrays, of mixed kinds or not of real numbers, and an `interleaved` that
        is no bool.
    ValueError
        Shapes that do not fit.

    Notes
    -----
    Su et al. 2021, RoFormer. Scalings of the frequencies or the magnitude (linear, NTK, YaRN, Llama
    3, LongRoPE) are in the tables: no table is rounded more than once however far the position.

    Examples
    --------
    >>> import cufa
    >>> rotary = cufa.Rotary.of_theta(10000.0, 64, 4096)  # base, elements, positions
    >>> rotary.cos.shape
    (4096, 32)
    """

    def __init__(self, cos: Array, sin: Array, *, interleaved: bool = False) -> None:
        xp = module_of_all({"cos": cos, "sin": sin})
        if cos.ndim != 2 or 0 in cos.shape:
            raise ValueError(f"cos has shape {cos.shape}: (positions, rotary_dim / 2) is needed")
        if sin.shape != cos.shape:
            raise ValueError(f"sin has shape {sin.shape}, but cos has shape {cos.shape}")
        _check_real("cos", cos.dtype)
        _check_real("sin", sin.dtype)
        self.cos: Array = xp.ascontiguousarray(cos, np.float32)
        self.sin: Array = xp.ascontiguousarray(sin, np.float32)
        self.interleaved = check_flag("interleaved", interleaved)

    @classmethod
    def of_frequencies(
        cls,
        frequencies: np.ndarray,
        positions: int,
        *,
        magnitude: float = 1.0,
        interleaved: bool = False,
        xp: Any = np,
    ) -> Rotary:
        """Make the tables of angles position * frequency.

        Parameters
        ----------
        frequencies : ndarray, shape (rotary_dim / 2,)
            Radians a position, scaled as a model asks for; on the host.
        positions : int
            Rows of the tables, from position 0 on: at least the tokens of the longest sequence.
        magnitude : float
            Factor of cosines and sines, such as YaRN's.
        interleaved : bool
        xp : module
            `numpy` or `cupy`: of the tables.

        Returns
        -------
        Rotary

        Raises
        ------
        TypeError, ValueError
            As of `Rotary`; frequencies or a magnitude that are no finite numbers, or too large for
            finite tables; positions that are no integer of 1 or more, an `xp` that is no such
            module.
        """
        check_module(xp)
        positions = check_size("positions", positions)
        frequencies = _numbers("frequencies", frequencies)
        if frequencies.ndim != 1 or frequencies.size == 0:
            raise ValueError(
                f"frequencies has shape {frequencies.shape}: (rotary_dim / 2,) is needed"
            )
        magnitude = _number("magnitude", magnitude)
        with np.errstate(over="ignore", invalid="ignore"):  # found below
            angles = np.arange(positions)[:, None] * frequencies
            tables = [(magnitude * of(angles)).astype(np.float32) for of in (np.cos, np.sin)]
        if not all(np.isfinite(table).all() for table in tables):
            raise ValueError(
                f"frequencies up to {abs(frequencies).max()} and magnitude {magnitude} give "
                "cosines and sines that are no finite float32 numbers"
            )
        cos, sin = map(xp.asarray, tables)
        return cls(cos, sin, interleaved=interleaved)

    @classmethod
    def of_theta(
        cls,
        theta: float,
        rotary_dim: int,
        positions: int,
        *,
        factors: np.ndarray | float = 1.0,
        magnitude: float = 1.0,
        interleaved: bool = False,
        xp: Any = np,
    ) -> Rotary:
        """Make the tables of the usual frequencies, theta^(-2 i / rotary_dim).

        Parameters
        ----------
        theta : float
            The base, such as 10000; more than 0.
        rotary_dim : int
            Elements of a head that are turned: an even number.
        positions : int
        factors : ndarray of shape (rotary_dim / 2,) or float
            What the frequencies are divided by, as for linear scaling or LongRoPE.
        magnitude, interleaved, xp
            As of `of_frequencies`.

        Returns
        -------
        Rotary

        Raises
        ------
        TypeError, ValueError
            As of `of_frequencies`; a `theta`, a `rotary_dim` or `factors` that do not fit.

        Notes
        -----
        The frequencies are those of Su et al. 2021, RoFormer, section 3.2.2.
        """
        theta = _number("theta", theta)
        if theta <= 0:
            raise ValueError(f"theta must be more than 0, not {theta}")
        rotary_dim = check_size("rotary_dim", rotary_dim)
        if rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even, not {rotary_dim}")
        divisors = _numbers("factors", factors)
        if divisors.shape not in ((), (rotary_dim // 2,)):
            raise ValueError(
                f"factors has shape {divisors.shape}: a number or ({rotary_dim // 2},) is needed"
            )
        if not divisors.all():
            raise ValueError("factors must not be 0")
        with np.errstate(over="ignore"):  # what is infinite is refused
            frequencies = theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim) / divisors
        return cls.of_frequencies(
            frequencies, positions, magnitude=magnitude, interleaved=interleaved, xp=xp
        )

    @property
    def positions(self) -> int:
        """Positions that the tables have, from 0 on."""
        return self.cos.shape[0]

    @property
    def dim(self) -> int:
        """Elements of a head that are turned."""
        return 2 * self.cos.shape[1]


def _check_real(name: str, dtype: np.dtype) -> None:
    if dtype.kind not in "fiu" and dtype.name not in DTYPES:
        raise TypeError(f"{name} has dtype {shown_dtype(dtype)}: real numbers are needed")


def _number(name: str, value: object) -> float:
    """Return a finite real number as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a real number, not {type(value).__name__}")
    number = as_float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    return number


def _numbers(name: str, values: Any) -> np.ndarray:
    """Return finite real numbers on the host as float64."""
    check_unmasked(name, values)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # a CuPy array, or lists of unequal lengths
        raise TypeError(
            f"{name} must be a NumPy array or a number, not {type(values).__name__}"
        ) from None
    _check_real(name, array.dtype)
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite")
    return array
