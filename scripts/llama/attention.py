"""How each layer of a config.json attends: its positions, its window, what becomes of scores."""

from typing import NamedTuple

from models import ModelError

from llama.folder import Values
from llama.frequencies import Rotation, read_context, read_rotation

FULL, SLIDING = "full_attention", "sliding_attention"

MOST_LAYERS = 10_000  # which no model comes near

#: Softcaps that cufa takes.
LEAST_SOFTCAP, MOST_SOFTCAP = 1e-6, 1e4


class Attention(NamedTuple):
    """How a layer attends.

    Attributes
    ----------
    rotation : Rotation
        The same object in layers that share it.
    window : tuple of int or None
    softcap, scale : float or None
        As in `cufa.attention`.
    """

    rotation: Rotation
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    scale: float | None = None


def read_attentions(raw: Values, model_type: str, head_dim: int) -> tuple[Attention, ...]:
    """Return how each layer attends; defaults are those of transformers.

    Raises
    ------
    ModelError
        Something of it is not supported, or has a value that makes no sense.
    """
    types = _types(raw, model_type)
    windows: dict[str, tuple[int | None, int | None]] = {FULL: (None, None)}
    if SLIDING in types:
        keys = raw.integer("sliding_window", 128 if model_type == "gpt_oss" else 4096)
        # A window of all positions would hide none: without it kernels have less to do.
        is_narrow = keys < read_context(raw, model_type)
        windows[SLIDING] = (keys - 1, None) if is_narrow else (None, None)
    rotations = {kind: read_rotation(raw, head_dim, model_type, kind) for kind in set(types)}
    if model_type != "gemma3_text":
        rotations = dict.fromkeys(rotations, rotations[types[0]])
    softcap = scale = None
    if model_type in ("gemma2", "gemma3_text"):
        scale = raw.number("query_pre_attn_scalar", 256) ** -0.5
    if model_type == "gemma2":
        softcap = raw.number_or_null("attn_logit_softcapping", 50.0)
        if softcap is not None and not LEAST_SOFTCAP <= softcap <= MOST_SOFTCAP:
            raise ModelError(
                f"attn_logit_softcapping must be {LEAST_SOFTCAP} to {MOST_SOFTCAP}, not {softcap}"
            )
    return tuple(Attention(rotations[kind], windows[kind], softcap, scale) for kind in types)


def _types(raw: Values, model_type: str) -> list[str]:
    """Return which layers see all keys before them, and which a window."""
    layers = raw.integer("num_hidden_layers", most=MOST_LAYERS)
    is_qwen = model_type.startswith("qwen")
    is_null = raw.has("sliding_window") and raw.get("sliding_window") is None
    if model_type == "llama":
        return [FULL] * layers
    if model_type == "mistral":
        return [FULL if is_null else SLIDING] * layers
    if is_qwen and (is_null or not raw.flag("use_sliding_window", False)):
        return [FULL] * layers
    if types := raw.items("layer_types"):
        if len(types) != layers:
            raise ModelError(f"layer_types has {len(types)} entries, but there are {layers} layers")
        for kind in types:
            if kind not in (FULL, SLIDING):
                raise ModelError(
                    f"layers of type {kind!r} are not supported ({FULL} and {SLIDING} are)"
                )
        return types
    if is_qwen:
        full = raw.integer("max_window_layers", 28, least=0)
        return [FULL if i < full else SLIDING for i in range(layers)]
    # Every second layer of Gemma 2 and gpt-oss sees all keys, every sixth of Gemma 3.
    is_gemma3 = model_type == "gemma3_text"
    every = raw.integer("sliding_window_pattern", 6) if is_gemma3 else 2
    return [SLIDING if (i + 1) % every else FULL for i in range(layers)]
