"""The rotary embeddings of a cache, one for each layer, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.api.rotary import Rotary
from cufa.arrays import module_of
from cufa.checks import check_devices


def rotaries_of(
    rotary: Any, layers: int, head_dim: int, capacity: int, xp: Any
) -> tuple[Rotary | None, ...]:
    """Return the embedding of each layer; None for none.

    Parameters
    ----------
    rotary : object
        The caller's: one for all layers, or a list or tuple with one for each.
    layers, head_dim : int
    capacity : int
        Tokens of the longest sequence.
    xp : module
        The module of the cache.

    Raises
    ------
    TypeError, ValueError
    """
    found = tuple(rotary) if isinstance(rotary, (list, tuple)) else (rotary,) * layers
    if len(found) != layers:
        raise ValueError(f"rotary has {len(found)} embeddings, but there are {layers} layers")
    for each in () if rotary is None else found:
        if not isinstance(each, Rotary):
            raise TypeError(f"rotary must be a cufa.Rotary, not {type(each).__name__}")
        module = module_of("rotary", each.cos)
        if module is not xp:
            raise TypeError(
                f"rotary has {module.__name__} arrays, but the cache is of {xp.__name__}"
            )
        if xp is not np:
            check_devices({"rotary": each.cos}, xp)
        if each.dim > head_dim:
            raise ValueError(
                f"rotary turns {each.dim} elements, but head_dim is {head_dim} (its tables hold an "
                "angle once: of Hugging Face's, which have both halves, pass cos[:, : dim // 2])"
            )
        if each.positions < capacity:
            raise ValueError(
                f"rotary has {each.positions} positions, but sequences may have {capacity}"
            )
    return found
