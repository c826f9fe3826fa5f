"""Random operands, masks among them, quickly made."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_PERIOD = (1 << 22) - 3  # a prime: the repeats meet rows and heads at other places each time


def normal(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Any:
    """Return normally distributed numbers, drawn on the host and repeated there on the device.

    `xp` is ``numpy`` or ``cupy``; CuPy needs NVRTC only.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal(min(math.prod(shape), _PERIOD), dtype=np.float32)
    return xp.resize(xp.asarray(drawn.astype(dtype)), shape)


def mostly(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Any:
    """Return truth values, nine in ten true, as bool, or eight in each uint8."""
    rng = np.random.default_rng(seed)
    bits = 8 if dtype == np.uint8 else 1
    drawn = rng.random(bits * min(math.prod(shape), _PERIOD), np.float32) < 0.9
    return xp.resize(xp.asarray(np.packbits(drawn) if bits == 8 else drawn), shape)
