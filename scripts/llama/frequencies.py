"""Frequencies of rotary position embedding (Su et al. 2021), as config.json scales them."""

from math import pi

import numpy as np
from models import ModelError

from llama.folder import Values


def read_frequencies(config: Values, head_dim: int, model_type: str, kind: str) -> np.ndarray:
    """Return the angles a position, (head_dim / 2,) float64, that a config.json asks for.

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
        It asks for a scaling of another kind than linear and llama3, or for a part of each head.
    """
    # Newer files hold everything under rope_parameters.
    rope = config.part("rope_parameters")
    is_gemma3, is_local = model_type == "gemma3_text", kind == "sliding_attention"
    if is_gemma3 and rope is not None:
        rope = rope.part(kind)
    if rope is None and not (is_gemma3 and is_local):  # which are never scaled
        rope = config.part("rope_scaling")
    rope = rope or Values({}, "")
    if rope.get("rope_theta") is not None:
        theta = rope.number("rope_theta")
    elif is_gemma3 and is_local:
        theta = config.number("rope_local_base_freq", 10000.0)
    else:
        theta = config.number("rope_theta", 1e6 if is_gemma3 else 10000.0)
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
