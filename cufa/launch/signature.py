"""Keys of calls: shapes, strides and options, but no addresses, which each launch is given."""

from __future__ import annotations

from typing import Any

Key = tuple[Any, ...]
AddressSlot = tuple[int, int]
"""A word of a kernel's parameter, and which of a launch's addresses goes there."""


def types_in(x: object) -> object:
    """Return the types of what a tuple holds; None for other objects."""
    return (*map(type, x),) if isinstance(x, tuple) else None


TENSORS = 5
"""Addresses that a launch is given first: of q, k, v, the result and its log-sum-exp."""
