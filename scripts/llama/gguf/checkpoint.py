"""The weights of a GGUF file, by the names and in the order of a Hugging Face checkpoint."""

import re
from collections.abc import Mapping

import numpy as np
from models import ModelError

from llama.config import Config
from llama.gguf.config import EMBEDDING, FACTORS, HEAD
from llama.gguf.file import PLAIN, GgufFile, dequantized
from llama.tensors import check_shapes

#: Names of what is in a layer.
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    **_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufCheckpoint:
    """As `llama.checkpoint.Checkpoint`, of a GGUF file.

    Parameters
    ----------
    file : GgufFile
    config : Config
    """

    def __init__(self, file: GgufFile, config: Config) -> None:
        self._file, self._config = file, config
        self._is_paired = file.metadata["general.architecture"] == "llama"
        self._own = {
            _known_name(name, config.post_norms): name for name in file.tensors if name != FACTORS
        }

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError unless the file holds tensors of just these names and shapes."""
        tensors = {name: self._file.tensors[own] for name, own in self._own.items()}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        check_shapes(str(self._file.path), shapes, expected, "its metadata")
        widths = {tensor.kind: tensor.row_bytes for tensor in tensors.values()}
        for kind in widths.keys() - PLAIN.keys():
            try:
                dequantized(np.zeros((1, widths[kind]), np.uint8), kind)
            except (NotImplementedError, ValueError, KeyError):
                raise ModelError(
                    f"{self._file.path} holds weights of type {kind}, which the package gguf "
                    "cannot turn to numbers"
                ) from None

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        return name in self._own

    def read(self, name: str) -> np.ndarray:
        """Return a tensor, float32 where the file's numbers are quantized."""
        array = self._file.read(self._own[name])
        if self._is_paired and ".q_proj." in name:
            return _halves(array, self._config.heads)
        if self._is_paired and ".k_proj." in name:
            return _halves(array, self._config.kv_heads)
        return array


def _known_name(name: str, is_gemma: bool) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return _OUTER.get(name, name)
    names = _GEMMA_NAMES if is_gemma else _NAMES
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{names[part]}.{kind}" if part in names else name


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in the order of a rotation that pairs the two halves of a head.

    Llama's in a GGUF file are for one that pairs neighbours.
    """
    by_pair = array.reshape(heads, -1, 2, *array.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(array.shape)
