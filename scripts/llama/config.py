"""config.json: which of Llama's relatives a folder holds, and its sizes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from models import DTYPES, ModelError

from llama.folder import Values, read_json
from llama.frequencies import read_frequencies

#: Values of model_type that are understood.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

MAX_HEAD_DIM = 256  # cufa's


@dataclass(frozen=True)
class Config:
    """What decides how a model computes.

    Attributes
    ----------
    vocabulary, hidden, inner, layers, heads, kv_heads, head_dim : int
        `inner` is the width between the two halves of the perceptron.
    eps : float
        Of the norms.
    frequencies : ndarray, (head_dim / 2,)
        Of the rotary embedding.
    tied : bool
        Whether the embedding's matrix gives the logits, too.
    qkv_bias, output_bias, mlp_bias, qk_norm : bool
        Which parts there are.
    context : int
        Positions that the model was made for.
    window : int or None
        Keys that a query of some layer sees at most.
    dtype : str
        Of the checkpoint: a key of `DTYPES`.
    eos : tuple of int
        Tokens that end a text.
    """

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    frequencies: np.ndarray
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    context: int
    window: int | None
    dtype: str
    eos: tuple[int, ...]


def read_config(folder: Path) -> Config:
    """Return what a folder's config.json says.

    Raises
    ------
    ModelError
        It is missing or damaged, or asks for what is not supported.
    """
    path = folder / "config.json"
    return config_of(Values(read_json(path), str(path)), str(folder))


def config_of(raw: Values, name: str) -> Config:
    """Return what the content of a config.json says, see `read_config`; errors name the model."""
    model_type = raw.text("model_type")
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ModelError(
            f"{name} holds a model of type {model_type!r}, which is not supported ({known} are)"
        )
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{name} holds quantized weights, which are not supported")
    if (activation := raw.text("hidden_act", "silu")) != "silu":
        raise ModelError(f"the activation {activation!r} is not supported (silu is)")
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    kv_heads = raw.integer("num_key_value_heads", heads)
    head_dim = raw.integer("head_dim", max(1, hidden // heads))
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads are no multiple of {kv_heads} key and value heads")
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise ModelError(f"heads of {head_dim} elements: even numbers to {MAX_HEAD_DIM} are needed")
    biased = model_type in ("llama", "qwen3") and raw.flag("attention_bias", False)
    dtype = raw.text("dtype", raw.text("torch_dtype", "float32"))
    return Config(
        vocabulary=raw.integer("vocab_size"),
        hidden=hidden,
        inner=raw.integer("intermediate_size"),
        layers=raw.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=raw.number("rms_norm_eps"),
        frequencies=read_frequencies(raw, head_dim),
        tied=raw.flag("tie_word_embeddings", False),
        qkv_bias=biased or model_type == "qwen2",
        output_bias=biased,
        mlp_bias=model_type == "llama" and raw.flag("mlp_bias", False),
        qk_norm=model_type == "qwen3",
        context=raw.integer("max_position_embeddings"),
        window=_window(raw, model_type),
        dtype=dtype if dtype in DTYPES else "float32",
        eos=raw.tokens("eos_token_id"),
    )


def _window(raw: Values, model_type: str) -> int | None:
    """Return the sliding window of the layers that have one; defaults are those of transformers."""
    if model_type == "mistral":
        off = raw.has("sliding_window") and raw.get("sliding_window") is None
        return None if off else raw.integer("sliding_window", 4096)
    if model_type == "llama" or not raw.flag("use_sliding_window", False):
        return None
    if types := raw.items("layer_types"):
        slides = "sliding_attention" in types
    else:
        full = raw.integer("max_window_layers", 28, least=0)
        slides = full < raw.integer("num_hidden_layers")
    return raw.integer("sliding_window", 4096) if slides else None
