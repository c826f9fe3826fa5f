"""MXFP4: numbers of 4 bits, 32 of which share a power of two (OCP Microscaling Formats 1.0)."""

import numpy as np
from models import DTYPES, Array, module_of

#: Numbers that share a scale.
BLOCK = 32

_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
#: The two numbers of each byte, that of the lower bits first.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)
#: The value of each scale; 255 is no number.
_POWERS = np.array([*(2.0 ** (scale - 127) for scale in range(255)), np.nan], np.float32)


def unpacked(blocks: Array, scales: Array) -> Array:
    """Return the numbers as bfloat16, which holds them as they are.

    Parameters
    ----------
    blocks : array, (matrices, outputs, inputs / 32, 16) uint8
    scales : array, (matrices, outputs, inputs / 32) uint8

    Returns
    -------
    array, (matrices, outputs, inputs)
    """
    xp = module_of(blocks)
    pairs, powers = xp.asarray(_PAIRS), xp.asarray(_POWERS)
    numbers = xp.empty((*blocks.shape, 2), DTYPES["bfloat16"])
    # A matrix at a time: float32 of all would take twice the memory.
    for i in range(len(blocks)):
        matrix = pairs[blocks[i]] * powers[scales[i]][..., None, None]
        numbers[i] = matrix.astype(numbers.dtype)
    return numbers.reshape(*scales.shape[:-1], -1)
