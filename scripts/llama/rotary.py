"""Rotary position embedding (Su et al. 2021) in the half-split form of Hugging Face's checkpoints.

Elements i and i + head_dim / 2 of a head are a pair, turned by position * frequency[i].
"""

from math import pi
from typing import Any

import numpy as np
from models import Array, ModelError

from llama.folder import Values


def frequencies(config: Values, head_dim: int) -> np.ndarray:
    """Return the angles a position, (head_dim / 2,) float64, that a config.json asks for.

    Raises
    ------
    ModelError
        It asks for a scaling of another kind than linear and llama3, or for a part of each head.
    """
    # Newer files hold everything under rope_parameters.
    rope = config.part("rope_parameters") or config.part("rope_scaling") or Values({}, "")
    theta = (rope if rope.get("rope_theta") is not None else config).number("rope_theta", 10000.0)
    for place in (config, rope):
        if place.number("partial_rotary_factor", 1.0) != 1:
            raise ModelError("rotary embedding of a part of each head is not supported")
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / rope.number("factor")
    if kind == "llama3":
        return _llama3(plain, rope)
    raise ModelError(f"rotary scaling of type {kind!r} is not supported (linear and llama3 are)")


def _llama3(plain: np.ndarray, rope: Values) -> np.ndarray:
    """Slow the low frequencies down, keep the high ones, and blend in between (Llama 3.1)."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ModelError("rotary scaling: high_freq_factor must exceed low_freq_factor")
    turns = rope.integer("original_max_position_embeddings") * plain / (2 * pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / rope.number("factor"))


class Rotary:
    """Cosines and sines of all positions below `length`.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    frequencies : ndarray, (head_dim / 2,)
    length : int
    """

    def __init__(self, xp: Any, frequencies: np.ndarray, length: int) -> None:
        angles = np.arange(length)[:, None] * frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        # (length, 1 for the heads, halves of a head, head_dim / 2)
        self._cos = xp.asarray(np.stack([cos, cos], 1)[:, None].astype(np.float32))
        self._sin = xp.asarray(np.stack([-sin, sin], 1)[:, None].astype(np.float32))

    def at(self, positions: slice | Array) -> tuple[Array, Array]:
        """Return what `rotate` takes for these positions."""
        return self._cos[positions], self._sin[positions]


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Return heads turned by their positions' angles.

    Parameters
    ----------
    x : array, (..., heads, head_dim), float32
    cos, sin : array, (..., 1, 2, head_dim / 2), float32
        As `Rotary.at` returns them, or broadcast to the positions of `x`.
    """
    halves = x.reshape(*x.shape[:-1], 2, -1)
    turned = halves * cos
    turned += halves[..., ::-1, :] * sin
    return turned.reshape(x.shape)
