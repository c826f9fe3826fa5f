"""The dtypes of caches, as callers name them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cufa.checks import shown_dtype
from cufa.dtypes import DTYPES
from cufa.quantized.rows import KINDS, Kind


def kind_of(dtype: Any) -> np.dtype | Kind:
    """Return the dtype of a cache, or its kind of numbers of 8 bits.

    Raises
    ------
    TypeError
    """
    if isinstance(dtype, str) and dtype in KINDS:
        return KINDS[dtype]
    known = _native(dtype, (*DTYPES, *KINDS))
    for kind in KINDS.values():
        if known == kind.on_host:
            return kind
    return _one_of(known, (*DTYPES, *KINDS))


def dtype_of(dtype: Any) -> np.dtype:
    """Return a dtype that `attention` takes.

    Raises
    ------
    TypeError
    """
    return _one_of(_native(dtype, (*DTYPES,)), (*DTYPES,))


def _one_of(known: np.dtype, names: tuple[str, ...]) -> np.dtype:
    if not known.isnative or known.name not in DTYPES:
        raise TypeError(f"{_needed(names)}, not {shown_dtype(known)}")
    return known


def _native(dtype: Any, names: tuple[str, ...]) -> np.dtype:
    if not isinstance(dtype, (str, type, np.dtype)):
        shown = repr(dtype)
        shown = shown if len(shown) < 40 else type(dtype).__name__
        raise TypeError(f"{_needed(names)}, not {shown}")
    try:
        return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    except Exception:  # which one depends on the kind of nonsense
        raise TypeError(f"{_needed(names)}, not {dtype!r}") from None


def _needed(names: tuple[str, ...]) -> str:
    return f"dtype must be one of {', '.join(names)}, as a string or a NumPy dtype"
