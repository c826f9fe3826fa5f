"""The arguments from which caches are made, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cufa.api.rotary import Rotary
from cufa.arrays import module_of
from cufa.caches.kinds import kind_of
from cufa.caches.pages import Pages
from cufa.caches.store import Store
from cufa.checks import check_devices, check_flag, check_layout, check_module, check_size
from cufa.quantized.rows import KINDS, Kind
from cufa.specs import MAX_HEAD_DIM


def made(
    arguments: Mapping[str, Any],
    sequences: int,
    capacity: int,
    pages: Pages | None = None,
) -> Store:
    """Make the storage of a cache.

    Parameters
    ----------
    arguments : mapping
        The arguments `heads_kv`, `head_dim`, `head_dim_v`, `dtype`, `smooth`, `layers`, `layout`,
        `rotary` and `xp` of `KVCache`, by name.
    sequences : int
    capacity : int
        Tokens of the longest sequence.
    pages : Pages, optional
        All of them are free.
    """
    check_layout(arguments["layout"])
    blocks, keys = (sequences, capacity) if pages is None else (pages.free, pages.page_size)
    sizes = blocks, check_size("heads_kv", arguments["heads_kv"]), keys
    head_dim = check_size("head_dim", arguments["head_dim"], MAX_HEAD_DIM)
    head_dim_v = head_dim if arguments["head_dim_v"] is None else arguments["head_dim_v"]
    head_dim_v = check_size("head_dim_v", head_dim_v, MAX_HEAD_DIM)
    layers, xp = check_size("layers", arguments["layers"]), arguments["xp"]
    rotary = arguments["rotary"]
    check_module(xp)
    rotaries: Any = rotary if isinstance(rotary, (list, tuple)) else (rotary,) * layers
    if len(rotaries) != layers:
        raise ValueError(f"rotary has {len(rotaries)} embeddings, but there are {layers} layers")
    if rotary is not None:
        for each in rotaries:
            _check_rotary(each, head_dim, capacity, xp)
    dtype, dims = kind_of(arguments["dtype"]), (head_dim, head_dim_v)
    smooth = check_flag("smooth", arguments["smooth"])
    if smooth and not isinstance(dtype, Kind):
        raise ValueError(
            f"smooth must be False where dtype is {dtype.name}: it is for caches of 8 bits, "
            f"{', '.join(KINDS)}"
        )
    return Store(
        *(xp, dtype, arguments["layout"], layers, sizes, dims, sequences, pages, tuple(rotaries)),
        smooth,
    )


def _check_rotary(rotary: Any, head_dim: int, capacity: int, xp: Any) -> None:
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a cufa.Rotary, not {type(rotary).__name__}")
    module = module_of("rotary", rotary.cos)
    if module is not xp:
        raise TypeError(f"rotary has {module.__name__} arrays, but the cache is of {xp.__name__}")
    if xp is not np:
        check_devices({"rotary": rotary.cos}, xp)
    if rotary.dim > head_dim:
        raise ValueError(
            f"rotary turns {rotary.dim} elements, but head_dim is {head_dim} (its tables hold an "
            "angle once: of Hugging Face's, which have both halves, pass cos[:, : dim // 2])"
        )
    if rotary.positions < capacity:
        raise ValueError(
            f"rotary has {rotary.positions} positions, but sequences may have {capacity}"
        )
