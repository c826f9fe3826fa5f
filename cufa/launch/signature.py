"""Keys of calls: which options they hold, and no addresses, which each launch is given."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa.specs.variant import Variant

Key = tuple[Any, ...]
AddressSlot = tuple[int, int]
"""A word of a kernel's parameter, and which of a launch's addresses goes there."""


_NUMBERS = {kind for kind in np.sctypeDict.values() if issubclass(kind, (np.number, np.bool_))}
_NUMBERS -= {np.timedelta64}  # 12 months equal a year, and int() tells them apart
PLAIN = {bool, int, float, str, type(None), tuple, Variant, *_NUMBERS}
"""Types of options whose values compare as one expects: others are never looked up."""


def types_in(x: object) -> Key | None:
    """Return the types of what a tuple holds; None for other objects."""
    return (*map(type, x),) if isinstance(x, tuple) else None


TENSORS = 5
"""Addresses that a launch is given first: of q, k, v, the result and its log-sum-exp."""
