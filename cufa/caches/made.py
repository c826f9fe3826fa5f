"""The arguments from which caches are made, checked."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from cufa.arrays import module_of_all
from cufa.caches.pages import Pages
from cufa.caches.store import Store
from cufa.checks import DTYPES, check_layout
from cufa.problem import MAX_HEAD_DIM
from cufa.rotary import Rotary


def made(
    shape: dict[str, int],
    head_dim: int,
    head_dim_v: int | None,
    *,
    dtype: Any,
    layers: int,
    layout: str,
    rotary: Rotary | None,
    xp: Any,
    sequences: int,
    capacity: int,
    pages: Pages | None,
) -> Store:
    """Make the storage of a cache.

    Parameters
    ----------
    shape : dict
        Sizes of a layer but for the head dim, by name.
    head_dim, head_dim_v, dtype, layers, layout, rotary, xp
        As of `KVCache`.
    sequences : int
    capacity : int
        Of the longest sequence.
    pages : Pages or None
    """
    check_layout(layout)
    blocks, heads, keys = (check_size(name, n) for name, n in shape.items())
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if check_size(name, dim) > MAX_HEAD_DIM:
            raise ValueError(f"{name} must be 1 to {MAX_HEAD_DIM}, not {dim}")
    check_size("layers", layers)
    if xp is not np and xp is not sys.modules.get("cupy"):
        raise TypeError(f"xp must be the module numpy or cupy, not {xp!r}")
    if rotary is not None:
        _check_rotary(rotary, head_dim, capacity, xp)
    return Store(
        xp,
        _dtype(dtype),
        layout,
        layers,
        (blocks, heads, keys),
        (head_dim, head_dim_v),
        sequences,
        pages,
        rotary,
    )


def check_size(name: str, n: int) -> int:
    """Return a size that is 1 or more."""
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, not {type(n).__name__}")
    if not 1 <= n < 2**31:
        raise ValueError(f"{name} must be at least 1 and fit in 32 bits, not {n}")
    return int(n)


def _dtype(dtype: Any) -> np.dtype:
    try:
        found = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    except TypeError:
        found = None
    if found is None or not found.isnative or found.name not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    return found


def _check_rotary(rotary: Rotary, head_dim: int, capacity: int, xp: Any) -> None:
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a cufa.Rotary, not {type(rotary).__name__}")
    module = module_of_all({"rotary": rotary.cos})
    if module is not xp:
        raise TypeError(f"rotary has {module.__name__} arrays, but the cache is of {xp.__name__}")
    if rotary.dim > head_dim:
        raise ValueError(f"rotary turns {rotary.dim} elements, but head_dim is {head_dim}")
    if rotary.positions < capacity:
        raise ValueError(
            f"rotary has {rotary.positions} positions, but sequences may have {capacity}"
        )
