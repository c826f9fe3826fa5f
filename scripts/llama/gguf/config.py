"""The metadata of a GGUF file as the config.json that it was made of."""

from dataclasses import replace
from typing import Any

import numpy as np
from models import ModelError

from llama.config import Config, config_of
from llama.folder import Values
from llama.gguf.file import GgufFile

#: Architectures, and what config.json calls them.
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

EMBEDDING, HEAD, FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
_GEMMA = {
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SCALING = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
#: Keys that change nothing, or that are checked here.
_OTHERS = (
    "vocab_size",
    "rope.dimension_count",
    "rope.scaling.finetuned",
    "attention.value_length",
    "tensor_data_layout",
    "expert_count",
    "expert_used_count",
)

#: Layers of Gemma 3 of 27 B, whose scores alone are not scaled by the head dim.
GEMMA_27B_LAYERS = 62


def read_config(file: GgufFile) -> Config:
    """Return what a file's metadata says.

    Raises
    ------
    ModelError
        It asks for what is not supported.
    """
    name = str(file.path)
    metadata = Values(file.metadata, name)
    architecture = metadata.text("general.architecture")
    if architecture not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ModelError(
            f"{name} holds a model of architecture {architecture!r}, which is not supported "
            f"({known} are)"
        )
    if metadata.integer("split.count", 1, least=0) > 1:
        raise ModelError(f"{name} is a part of a model: llama-gguf-split --merge makes one file")
    if EMBEDDING not in file.tensors:
        raise ModelError(f"{name} lacks the tensor {EMBEDDING}")
    raw = {
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        **_of_keys(file, architecture),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": HEAD not in file.tensors,
        "dtype": _dtype(file),
    }
    config = config_of(Values(raw, name), name)
    if FACTORS in file.tensors:
        config = _slowed(config, file.read(FACTORS).astype(np.float64), name)
    return replace(config, norm_offset=0.0)  # it is in the file's weights


def _of_keys(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Return what keys such as llama.block_count say, as config.json does."""
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    is_gemma = architecture == "gemma3"
    sizes = {**_SIZES, **_GEMMA} if is_gemma else _SIZES
    known = {*sizes.values(), *_SCALING.values(), *_OTHERS}
    for key, value in own.items():
        if key not in known:
            raise ModelError(f"{file.path}: {prefix}{key} is {value!r}, which is not supported")
    values = Values(own, f"{file.path}: {architecture}")
    if values.integer("expert_count", 0, least=0):
        raise ModelError(f"{file.path} holds a mixture of experts, which is not supported")
    raw: dict[str, Any] = {name: own[key] for name, key in sizes.items() if key in own}
    hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", max(1, hidden // heads))
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys and values of different lengths are not supported")
    raw["head_dim"] = head_dim
    raw["partial_rotary_factor"] = values.integer("rope.dimension_count", head_dim) / head_dim
    scaling = {name: own[key] for name, key in _SCALING.items() if key in own}
    if scaling.get("rope_type", "none") != "none":
        raw["rope_scaling"] = scaling
    if is_gemma:
        is_largest = raw.get("num_hidden_layers") == GEMMA_27B_LAYERS
        raw["query_pre_attn_scalar"] = hidden // heads if is_largest else head_dim
    return raw


def _dtype(file: GgufFile) -> str:
    """Return the dtype that matrices were stored in, or were before they were quantized."""
    tensor = file.tensors.get("blk.0.attn_q.weight")
    kinds = {"F32": "float32", "F16": "float16"}
    return kinds.get(tensor.kind, "bfloat16") if tensor else "float32"


def _slowed(config: Config, factors: np.ndarray, name: str) -> Config:
    """Divide the rotary frequencies by a file's factors, as those of Llama 3.1."""
    attentions = []
    for attention in config.attentions:
        rotation = attention.rotation
        if factors.shape != rotation.frequencies.shape or not (factors > 0).all():
            raise ModelError(f"{name}: {FACTORS} must be {len(rotation.frequencies)} factors")
        attentions.append(
            attention._replace(
                rotation=rotation._replace(frequencies=rotation.frequencies / factors)
            )
        )
    return replace(config, attentions=tuple(attentions))
