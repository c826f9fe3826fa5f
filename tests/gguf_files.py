"""Small GGUF files, made of the folders of `llama_folders` as llama.cpp's converter makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import pi
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

#: Architectures by model_type.
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}

Weights = dict[str, np.ndarray]


def write(
    path: Path,
    folder: Path,
    weights: Weights,
    kind: str = "F32",
    also: Callable[[GGUFWriter], Any] = lambda writer: None,
) -> None:
    """Write what a folder's config.json says and its weights; `also` adds metadata.

    Matrices are of the type `kind`.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    also(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    for name, weight in weights.items():
        if config["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
            weight = _by_pairs(weight, heads if ".q_proj." in name else kv_heads)
        if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            weight = weight + 1
        own = names.get_name(name, (".weight", ".bias"))
        assert own is not None
        type_ = GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
        writer.add_tensor(own, quantize(weight, type_), raw_dtype=type_)
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads, arch = config["num_attention_heads"], writer.arch
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(config.get("rope_theta", rope.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32(
            "gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"]
        )
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "beta_fast" in scaling:
            writer.add_float32(f"{arch}.rope.scaling.yarn_beta_fast", scaling["beta_fast"])


def _by_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as the converter's `permute` orders them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _rope_factors(config: dict[str, Any]) -> np.ndarray | None:
    """Return what the converter makes of Llama 3's scaling."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, factor, dim = (
        scaling["original_max_position_embeddings"],
        scaling["factor"],
        config["head_dim"],
    )
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * pi * config["rope_theta"] ** (i / dim)
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
