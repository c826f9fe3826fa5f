"""Random operands, quickly made."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_PERIOD = (1 << 22) - 3  # a prime: the repeats meet rows and heads at other places each time


def normal(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Any:
    """Return normally distributed numbers, drawn on the host and repeated there on the device.

    `xp` is ``numpy`` or ``cupy``; of the latter no more than NVRTC is needed.
    """
    size = math.prod(shape)
    drawn = np.random.default_rng(seed).standard_normal(min(size, _PERIOD), dtype=np.float32)
    block = xp.asarray(drawn.astype(dtype))
    flat = xp.empty(size, dtype)
    for first in range(0, size, _PERIOD):
        part = flat[first : first + _PERIOD]
        part[...] = block[: part.size]
    return flat.reshape(shape)
