"""Small random checkpoints of each architecture, the same wherever they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from llama.config import read_config
from llama.tensors import BLOCKS, GATE_UP, SCALES, tensor_shapes
from safetensors.numpy import save_file

VOCABULARY = 64

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 6,
    "rope_theta": 150000.0,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
}

#: config.json of a small model in the way of each.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "tie_word_embeddings": False},
    "llama3": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-biased-linear": {
        "model_type": "llama",
        "num_key_value_heads": 3,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "mistral": {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "head_dim": 12,
        "sliding_window": 1024,
        "rope_theta": 10000.0,
    },
    "qwen2": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "model_type": "qwen3",
        "num_key_value_heads": 3,
        "head_dim": 32,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "rms_norm_eps": 1e-6,
    },
    "mistral-window": {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "head_dim": 12,
        "sliding_window": 8,
    },
    "qwen2-window": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3-window": {
        "model_type": "qwen3",
        "num_key_value_heads": 3,
        "head_dim": 32,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {
        "model_type": "gemma2",
        "num_key_value_heads": 3,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 7,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3-types": {
        "model_type": "gemma3_text",
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    },
    "qwen3-yarn": {
        "model_type": "qwen3",
        "num_key_value_heads": 3,
        "head_dim": 32,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 8.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gpt-oss": {
        **GPT_OSS,
        "num_hidden_layers": 4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "gpt-oss-mxfp4": {
        **GPT_OSS,
        "layer_types": ["full_attention", "sliding_attention"],
        "attention_bias": False,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                *("model.embed_tokens", "lm_head"),
            ],
        },
    },
    "smollm": {
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}

#: Two sequences of 40 tokens.
TOKENS = np.random.default_rng(7).integers(0, VOCABULARY, (2, 40))


def packed(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of MXFP4: any numbers, and scales that give them the sizes of others."""
    low, high = (0, 256) if name.endswith(BLOCKS) else (122, 126)
    return rng.integers(low, high, shape, np.uint8)


def write(folder: Path, name: str, **changes: Any) -> dict[str, np.ndarray]:
    """Write config.json and model.safetensors of one of `CONFIGS`; return the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **CONFIGS[name], **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {}
    read = read_config(folder)
    for number, (tensor, shape) in enumerate(tensor_shapes(read).items()):
        rng = np.random.Generator(np.random.PCG64((number, *shape)))
        if tensor.endswith((BLOCKS, SCALES)):
            weights[tensor] = packed(rng, tensor, shape)
            continue
        values = rng.standard_normal(shape)
        if tensor.endswith("norm.weight"):
            values = 1 - read.norm_offset + values / 4
        elif tensor.endswith(GATE_UP):
            values /= 2  # so that what a gate cuts off is there
        elif len(shape) > 1:
            values /= shape[1] ** 0.5
        weights[tensor] = values.astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


#: As Qwen's: a turn in marks of its own, which the tokenizer holds as special tokens.
CHAT_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role: ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_byte_tokenizer(folder: Path, *, chat: bool = False) -> None:
    """Write a tokenizer of single bytes in the way of Qwen's: 256 of them and three marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": SPECIAL[2], "bos_token": None}
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_piece_tokenizer(folder: Path) -> None:
    """Write a tokenizer in the way of Llama 2's: words with their spaces, other letters by byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i"]
    words += ["▁h", "▁hi"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("▁", "h"), ("▁h", "i")]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "</s>", "special": True}, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
