"""The sizes of a Llama that is trained, and the config.json that says them."""

from dataclasses import dataclass
from typing import Any

from llama.config import config_of
from llama.folder import Values
from llama.tensors import tensor_shapes


@dataclass(frozen=True)
class Sizes:
    """A Llama without biases, whose embedding gives the logits, too.

    Attributes
    ----------
    vocabulary, hidden, inner, layers, heads, kv_heads, head_dim : int
        `inner` is the width between the two halves of the perceptron.
    positions : int
        Tokens of the longest sequence.
    eps : float
        Added to mean squares by the norms.
    theta : float
        Base of the rotary frequencies.
    """

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    eps: float = 1e-5
    theta: float = 10000.0

    def config(self) -> dict[str, Any]:
        """Return the content of config.json, for weights that are saved in bfloat16."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the parameters, as checkpoints have them."""
        return tensor_shapes(config_of(Values(self.config(), "config.json"), "the model"))
