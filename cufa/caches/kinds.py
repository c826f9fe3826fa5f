"""The dtypes of caches, as callers name them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cufa.checks import shown_dtype
from cufa.dtypes import DTYPES
from cufa.quantized.rows import Kind


def dtype_of(dtype: Any, kinds: Iterable[Kind] = ()) -> np.dtype:
    """Return a dtype that `attention` takes, or that some kinds of 8-bit numbers have on the host.

    Raises
    ------
    TypeError
    """
    named = {name: row.numpy for name, row in DTYPES.items()}
    named |= {kind.name: kind.on_host for kind in kinds}
    if isinstance(dtype, str) and dtype in named:
        return named[dtype]
    needed = f"dtype must be one of {', '.join(named)}, as a string or a NumPy dtype"
    if not isinstance(dtype, (str, type, np.dtype)):
        shown = repr(dtype)
        shown = shown if len(shown) < 40 else type(dtype).__name__
        raise TypeError(f"{needed}, not {shown}")
    try:
        known = np.dtype(dtype)
    except Exception:  # which one depends on the kind of nonsense
        raise TypeError(f"{needed}, not {dtype!r}") from None
    if known not in named.values():
        raise TypeError(f"{needed}, not {shown_dtype(known)}")
    return known
