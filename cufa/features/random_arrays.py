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
    return _repeated(xp, shape, drawn.astype(dtype))


def mostly(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Any:
    """Return truth values, nine in ten true, as bool, or eight in each uint8."""
    rng = np.random.default_rng(seed)
    bits = 8 if dtype == np.uint8 else 1
    drawn = rng.random(bits * min(math.prod(shape), _PERIOD), np.float32) < 0.9
    return _repeated(xp, shape, np.packbits(drawn) if bits == 8 else drawn)


def _repeated(xp: Any, shape: tuple[int, ...], drawn: np.ndarray) -> Any:
    size = math.prod(shape)
    block = xp.asarray(drawn)
    flat = xp.empty(size, drawn.dtype)
    for first in range(0, size, _PERIOD):
        part = flat[first : first + _PERIOD]
        part[...] = block[: part.size]
    return flat.reshape(shape)
