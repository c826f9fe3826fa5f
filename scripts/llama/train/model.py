"""The network that is trained: embedding, layers, last norm, and logits by the embedding."""

from typing import Any

import numpy as np
from models import Array

from llama.tensors import EMBEDDING, LAST_NORM
from llama.train.attention import Attention
from llama.train.embedding import Embedding
from llama.train.linear import Linear
from llama.train.norm import RMSNorm
from llama.train.parameters import Parameters
from llama.train.perceptron import Perceptron
from llama.train.rotary import Rotary
from llama.train.sizes import Sizes


class Layer:
    """One decoder layer: attention and a perceptron, of what was normed, and added.

    Parameters
    ----------
    at : str
        The beginning of its parameters' names.
    parameters : Parameters
    rotary : Rotary
    sizes : Sizes
    """

    def __init__(self, at: str, parameters: Parameters, rotary: Rotary, sizes: Sizes) -> None:
        def linear(part: str, *names: str) -> Linear:
            return Linear(parameters.stacked([f"{at}.{part}.{name}.weight" for name in names]))

        def norm(name: str) -> RMSNorm:
            return RMSNorm(parameters[f"{at}.{name}.weight"], sizes.eps)

        qkv = linear("self_attn", "q_proj", "k_proj", "v_proj")
        self._attention = Attention(qkv, linear("self_attn", "o_proj"), rotary, sizes)
        self._attention_norm = norm("input_layernorm")
        self._perceptron = Perceptron(
            linear("mlp", "gate_proj", "up_proj"), linear("mlp", "down_proj")
        )
        self._perceptron_norm = norm("post_attention_layernorm")

    def add_to(self, x: Array, batch: int) -> None:
        """Add the layer's two outputs to x, (tokens, hidden), in place."""
        x += self._attention.forward(self._attention_norm.forward(x), batch)
        x += self._perceptron.forward(self._perceptron_norm.forward(x))

    def add_gradient_to(self, dx: Array) -> None:
        """Make dx, in place, from dy, (tokens, hidden)."""
        dx += self._perceptron_norm.backward(self._perceptron.backward(dx))
        dx += self._attention_norm.backward(self._attention.backward(dx))


class TrainedLlama:
    """A Llama in training, of random parameters at first.

    Parameters
    ----------
    sizes : Sizes
    xp : module
        `numpy` or `cupy`.
    rng : numpy.random.Generator
        Draws the parameters.
    dtype : numpy.dtype, optional

    Attributes
    ----------
    xp : module
    parameters : Parameters
    """

    def __init__(
        self,
        sizes: Sizes,
        xp: Any,
        rng: np.random.Generator,
        dtype: np.dtype = np.dtype(np.float32),  # noqa: B008, never changed
    ) -> None:
        self.xp = xp
        self.parameters = Parameters(sizes.tensors(), xp, dtype, rng)
        rotary = Rotary(sizes, xp, dtype)
        embedding = self.parameters[EMBEDDING]
        self._embedding, self._head = Embedding(embedding), Linear(embedding)
        self._norm = RMSNorm(self.parameters[LAST_NORM], sizes.eps)
        self._layers = [
            Layer(f"model.layers.{i}", self.parameters, rotary, sizes) for i in range(sizes.layers)
        ]

    def forward(self, ids: Array) -> Array:
        """Return the logits, (batch * seq, vocabulary), of token ids (batch, seq)."""
        x = self._embedding.forward(ids.reshape(-1))
        for layer in self._layers:
            layer.add_to(x, len(ids))
        return self._head.forward(self._norm.forward(x))

    def backward(self, gradient: Array) -> None:
        """Write the gradients of all parameters, from that of the logits of the last `forward`."""
        dx = self._norm.backward(self._head.backward(gradient))
        for layer in reversed(self._layers):
            layer.add_gradient_to(dx)
        self._embedding.backward(dx)
