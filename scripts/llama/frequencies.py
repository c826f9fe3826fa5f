"""Frequencies of rotary position embedding (Su et al. 2021), as config.json scales them."""

import sys
from math import ceil, floor, log, pi
from typing import NamedTuple

import numpy as np
from models import ModelError

from llama.folder import Values

#: The defaults of transformers for a gpt-oss whose config.json says nothing.
GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
THETAS = {"gemma3_text": 1e6, "gpt_oss": 150000.0}

MOST_POSITIONS = 2**31 - 1


class Rotation(NamedTuple):
    """How queries and keys are turned.

    Attributes
    ----------
    frequencies : ndarray, (head_dim / 2,) float64
        Angles a position.
    magnitude : float
        Factor of cosines and sines.
    """

    frequencies: np.ndarray
    magnitude: float = 1.0


def read_rotation(config: Values, head_dim: int, model_type: str, kind: str) -> Rotation:
    """Return the rotation that a config.json asks for.

    Parameters
    ----------
    config : Values
    head_dim : int
    model_type : str
    kind : str
        The layer's, of `layer_types`; only those of Gemma 3 have frequencies of their own.

    Raises
    ------
    ModelError
        It asks for a scaling of another kind than linear, dynamic, llama3 and yarn, for one that
        gives no frequencies, or for a part of each head.
    """
    with np.errstate(all="ignore"):
        rotation = _scaled(config, head_dim, model_type, kind)
    if not np.isfinite(rotation.frequencies).all():
        raise ModelError("rotary scaling gives frequencies that are not finite")
    return rotation


def read_context(config: Values, model_type: str) -> int:
    """Return how many positions a config.json asks for, with those that a scaling adds.

    For linear and YaRN, max_position_embeddings is the length before the scaling or after it:
    files are written in both ways. For dynamic it is the length that the scaling leaves as it is.
    """
    positions = config.integer("max_position_embeddings")
    rope = config.part("rope_parameters") or config.part("rope_scaling")
    if rope is None or model_type == "gemma3_text":  # whose files have the length after it
        return positions
    if rope.text("rope_type", rope.text("type", "default")) not in ("linear", "yarn"):
        return positions
    original = rope.integer("original_max_position_embeddings", positions)
    return max(positions, int(min(original * rope.number("factor", 1.0), MOST_POSITIONS)))


def _scaled(config: Values, head_dim: int, model_type: str, kind: str) -> Rotation:
    # Newer files hold everything under rope_parameters.
    rope = config.part("rope_parameters")
    is_gemma3, is_local = model_type == "gemma3_text", kind == "sliding_attention"
    if is_gemma3 and rope is not None:
        rope = rope.part(kind)
    if rope is None and not (is_gemma3 and is_local):  # which are never scaled
        rope = config.part("rope_scaling")
    rope = rope or Values(GPT_OSS if model_type == "gpt_oss" else {}, "")
    if rope.get("rope_theta") is not None:
        theta = rope.number("rope_theta")
    elif is_gemma3 and is_local:
        theta = config.number("rope_local_base_freq", 10000.0)
    else:
        theta = config.number("rope_theta", THETAS.get(model_type, 10000.0))
    for place in (config, rope):
        if place.number("partial_rotary_factor", 1.0) != 1:
            raise ModelError("rotary embedding of a part of each head is not supported")
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind in ("default", "dynamic"):  # the second changes texts of more than all positions
        return Rotation(plain)
    if kind == "linear":
        return Rotation(plain / rope.number("factor"))
    if kind == "llama3":
        return Rotation(_llama3(plain, rope))
    if kind == "yarn":
        positions = rope.integer(
            "original_max_position_embeddings", config.integer("max_position_embeddings")
        )
        factor = rope.number("factor", config.integer("max_position_embeddings") / positions)
        return Rotation(_yarn(plain, rope, theta, positions, factor), _yarn_magnitude(rope, factor))
    raise ModelError(
        f"rotary scaling of type {kind!r} is not supported (linear, dynamic, llama3 and yarn are)"
    )


def _llama3(plain: np.ndarray, rope: Values) -> np.ndarray:
    """Slow the low frequencies down, keep the high ones, and blend in between (Llama 3.1)."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise ModelError("rotary scaling: high_freq_factor must exceed low_freq_factor")
    turns = rope.integer("original_max_position_embeddings") * plain / (2 * pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / rope.number("factor"))


def _yarn(
    plain: np.ndarray, rope: Values, theta: float, positions: int, factor: float
) -> np.ndarray:
    """Slow frequencies of few turns down, keep those of many, and blend in between (Peng 2023).

    The blend is linear in the frequency's number, from the one of `beta_fast` turns in the
    positions of the training on to the one of `beta_slow`.
    """
    if theta <= 1:
        raise ModelError("rotary scaling: rope_theta must exceed 1")
    dim = 2 * len(plain)

    def number_of(key: str, default: float) -> float:
        turns = rope.number(key, default)
        ratio = positions / (turns * 2 * pi)
        if not 0 < ratio <= sys.float_info.max:
            raise ModelError(f"rotary scaling: {key} cannot be {turns}")
        return dim * log(ratio) / (2 * log(theta))

    fast, slow = number_of("beta_fast", 32.0), number_of("beta_slow", 1.0)
    if rope.flag("truncate", True):
        fast, slow = floor(fast), ceil(slow)
    first, last = max(fast, 0), min(slow, dim - 1)
    width = last - first or 0.001  # as transformers has it
    kept = 1 - np.clip((np.arange(len(plain)) - first) / width, 0, 1)
    return plain * (kept + (1 - kept) / factor)


def _yarn_magnitude(rope: Values, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def grown(scale: float) -> float:
        return 0.1 * scale * log(factor) + 1 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope.number("mscale")) / grown(rope.number("mscale_all_dim"))
    return grown(1.0)
