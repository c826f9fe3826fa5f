"""The dtypes of caches, as callers name them."""

from __future__ import annotations

from collections.abc import Collection
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
    of_8_bits = {kind.on_host: kind for kind in KINDS.values()}
    known = _checked(dtype, (*DTYPES, *KINDS), of_8_bits)
    return of_8_bits.get(known, known)


def dtype_of(dtype: Any) -> np.dtype:
    """Return a dtype that `attention` takes.

    Raises
    ------
    TypeError
    """
    return _checked(dtype, (*DTYPES,))


def _checked(dtype: Any, names: tuple[str, ...], others: Collection[np.dtype] = ()) -> np.dtype:
    """Return a dtype, one of `DTYPES` or of others; errors say the names."""
    needed = f"dtype must be one of {', '.join(names)}, as a string or a NumPy dtype"
    if not isinstance(dtype, (str, type, np.dtype)):
        shown = repr(dtype)
        shown = shown if len(shown) < 40 else type(dtype).__name__
        raise TypeError(f"{needed}, not {shown}")
    try:
        known = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    except Exception:  # which one depends on the kind of nonsense
        raise TypeError(f"{needed}, not {dtype!r}") from None
    if known not in others and known not in [row.numpy for row in DTYPES.values()]:
        raise TypeError(f"{needed}, not {shown_dtype(known)}")
    return known
