"""Integers that callers give for sequences, and their errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.arrays import check_unmasked
from cufa.checks import check_size

Counts = Any  # int, sequence of int or ndarray

_MOST = 2**31 - 1  # tokens: lengths are int32


def integers(name: str, values: object) -> np.ndarray:
    """Return an integer, or several, on the host as an array.

    Raises
    ------
    TypeError
    """
    check_unmasked(name, values)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # a CuPy array, or lists of unequal lengths
        raise TypeError(
            f"{name} must be an integer or as many as sequences, on the host, not "
            f"{type(values).__name__}"
        ) from None
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, not {array.dtype.name}")
    return array


def counts_of(name: str, values: object, in_use: np.ndarray, first: int) -> np.ndarray:
    """Return a number of tokens for each sequence, int64.

    Parameters
    ----------
    name : str
        The argument.
    values : object
        The caller's: one number is for each sequence that is in use.
    in_use : ndarray of bool
        Whether each sequence is in use.
    first : int
        The number of the first sequence.

    Raises
    ------
    TypeError, ValueError
        They are no integers, negative, too large, not as many as sequences, or of a sequence that
        has not been allocated; or one number, and no sequence is in use.
    """
    array = integers(name, values)
    if array.ndim and array.shape != in_use.shape:
        raise ValueError(f"{name} has shape {array.shape}, but there are {in_use.size} sequences")
    numbers = array.ravel().tolist()
    if numbers and min(numbers) < 0:
        raise ValueError(f"{name} must not be negative, but {min(numbers)} is")
    if numbers and max(numbers) > _MOST:
        raise ValueError(f"{name} must not be more than {_MOST}, but {max(numbers)} is")
    counts = np.empty(in_use.shape, np.int64)
    counts[...] = array
    if np.count_nonzero(in_use) == in_use.size:  # takes a fraction of what `all` does
        return counts
    if array.ndim == 0:
        if array > 0 and in_use.size and not in_use.any():
            raise not_allocated(first, in_use.size)
        counts[~in_use] = 0
    idle = np.flatnonzero((counts > 0) & ~in_use)
    if idle.size:
        raise not_allocated(first + int(idle[0]), argument=f"{name}: ")
    return counts


def not_allocated(first: int, sequences: int = 1, argument: str = "") -> ValueError:
    """Return the error of a call for sequences none of which has been allocated."""
    if sequences == 1:
        which, how = f"{argument}sequence {first} has not", "allocate()"
    else:
        which = f"none of the sequences {first} to {first + sequences - 1} has"
        how = "call allocate() first, which"
    return ValueError(f"{which} been allocated: {how} returns the number of a new one")


def check_sequence(sequence: object, in_use: np.ndarray) -> int:
    """Return the number of a sequence as a plain integer; refuse one that is not in use."""
    number = check_size("sequence", sequence, in_use.size - 1, least=0)
    if not in_use[number]:
        raise not_allocated(number)
    return number
