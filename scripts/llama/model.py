"""The network: a decoder as Llama's (Touvron et al. 2023) and those that followed it."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from models import DTYPES, Array, Linear, ModelError, choose_array_module

from llama.cache import Cache, Step
from llama.checkpoint import Checkpoint
from llama.config import Config, read_config
from llama.ops import rms_norm, swiglu

EMBEDDING, LAST_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that a checkpoint of this model holds."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (c.vocabulary, c.hidden),
        LAST_NORM: (c.hidden,),
    }
    if not c.tied:
        shapes[HEAD] = (c.vocabulary, c.hidden)
    for i in range(c.layers):
        at = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (c.hidden,)
        if c.qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{at}.self_attn.{name}.weight"] = (c.head_dim,)
        for name, outputs, inputs, bias in (
            ("self_attn.q_proj", q, c.hidden, c.qkv_bias),
            ("self_attn.k_proj", kv, c.hidden, c.qkv_bias),
            ("self_attn.v_proj", kv, c.hidden, c.qkv_bias),
            ("self_attn.o_proj", c.hidden, q, c.output_bias),
            ("mlp.gate_proj", c.inner, c.hidden, c.mlp_bias),
            ("mlp.up_proj", c.inner, c.hidden, c.mlp_bias),
            ("mlp.down_proj", c.hidden, c.inner, c.mlp_bias),
        ):
            shapes[f"{at}.{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{at}.{name}.bias"] = (outputs,)
    return shapes


class Layer(NamedTuple):
    """One decoder layer: attention and a gated perceptron, each of what was normed, and added."""

    attention_norm: Array
    qkv: Linear
    qk_norm: Array | None
    output: Linear
    mlp_norm: Array
    gate_up: Linear
    down: Linear

    def __call__(self, number: int, x: Array, step: Step, config: Config) -> Array:
        """Return the layer's output, (tokens, hidden) float32 like its input `x`."""
        qkv = self.qkv(rms_norm(x, self.attention_norm, config.eps))
        qkv = qkv.reshape(len(x), -1, config.head_dim)
        split = config.heads + config.kv_heads
        qk, v = qkv[:, :split], qkv[:, split:]
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, config.eps)
        x = x + self.output(step.attend(number, qk, v))
        return x + self.down(swiglu(self.gate_up(rms_norm(x, self.mlp_norm, config.eps))))


class Llama:
    """A decoder of a Hugging Face folder.

    Parameters
    ----------
    folder : Path
        With config.json and safetensors.
    device : {"auto", "cpu", "gpu"}
        Where it runs; "auto" prefers the GPU.
    dtype : {"auto", "float32", "float16", "bfloat16"}
        The dtype of matrices, keys and values; the rest is float32. "auto" is float32 on the CPU
        and the checkpoint's own on a GPU.

    Attributes
    ----------
    xp : module
        `numpy` or `cupy`.
    config : Config

    Raises
    ------
    ModelError
        The folder is damaged or holds another kind of model, a package is missing, or there is no
        GPU and one was asked for.
    ValueError
        `device` or `dtype` is unknown.
    """

    def __init__(self, folder: Path, device: str = "auto", dtype: str = "auto") -> None:
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
        self.xp = choose_array_module(device)
        self.config = read_config(folder)
        if dtype == "auto":
            dtype = "float32" if self.xp is np else self.config.dtype
        self._dtype = DTYPES[dtype]
        checkpoint = Checkpoint(folder)
        shapes = tensor_shapes(self.config)
        if self.config.tied and HEAD in checkpoint:
            shapes[HEAD] = shapes[EMBEDDING]  # the same matrix once more
        checkpoint.check(shapes)

        def vector(*names: str) -> Array:
            return self.xp.asarray(checkpoint.read(*names).astype(np.float32))

        def dense(at: str, *names: str) -> Linear:
            weights = [f"{at}.{name}.weight" for name in names]
            biases = [f"{at}.{name}.bias" for name in names if f"{at}.{name}.bias" in shapes]
            return Linear(
                self.xp,
                self._dtype,
                [checkpoint.read(name) for name in weights],
                [checkpoint.read(name) for name in biases] or None,
            )

        def qk_norm(at: str) -> Array | None:
            if not self.config.qk_norm:
                return None
            heads = (self.config.heads, self.config.kv_heads)
            return self.xp.concatenate(
                [
                    self.xp.broadcast_to(vector(f"{at}.{name}.weight"), (n, self.config.head_dim))
                    for name, n in zip(("q_norm", "k_norm"), heads, strict=True)
                ]
            )

        def matrix(name: str) -> Linear:
            return Linear(self.xp, self._dtype, [checkpoint.read(name)])

        embedding = matrix(EMBEDDING)
        self._embedding = embedding.weight
        self._head = embedding if self.config.tied else matrix(HEAD)
        self._norm = vector(LAST_NORM)
        self._layers = []
        for i in range(self.config.layers):
            at = f"model.layers.{i}"
            self._layers.append(
                Layer(
                    attention_norm=vector(f"{at}.input_layernorm.weight"),
                    qkv=dense(f"{at}.self_attn", "q_proj", "k_proj", "v_proj"),
                    qk_norm=qk_norm(f"{at}.self_attn"),
                    output=dense(f"{at}.self_attn", "o_proj"),
                    mlp_norm=vector(f"{at}.post_attention_layernorm.weight"),
                    gate_up=dense(f"{at}.mlp", "gate_proj", "up_proj"),
                    down=dense(f"{at}.mlp", "down_proj"),
                )
            )

    def cache(self, sequences: int, capacity: int) -> Cache:
        """Return an empty cache for so many sequences of so many tokens at most."""
        return Cache(self.xp, self.config, self._dtype, sequences, capacity)

    def extend(self, cache: Cache, rows: slice, ids: Array) -> Array:
        """Append tokens to sequences of a cache.

        Parameters
        ----------
        cache : Cache
        rows : slice
            The sequences.
        ids : array, (sequences of `rows`, tokens of each)
            Of the module `xp`.

        Returns
        -------
        array, (sequences of `rows`, tokens of each, hidden), float32
            What `logits` takes.
        """
        step = cache.step(rows, ids.shape[1])
        x = self._embedding[ids.reshape(-1)].astype(np.float32)
        for number, layer in enumerate(self._layers):
            x = layer(number, x, step, self.config)
        return x.reshape(*ids.shape, -1)

    def logits(self, states: Array) -> Array:
        """Return (n, vocabulary) float32 of the states (n, hidden) of n tokens."""
        return self._head(rms_norm(states, self._norm, self.config.eps))

    def check_length(self, tokens: int) -> None:
        """Raise ModelError if a sequence of so many tokens is longer than the model takes."""
        limit = self.longest
        if tokens > limit:
            what = "positions" if limit == self.config.context else "tokens of its sliding window"
            raise ModelError(
                f"{tokens} tokens, of the prompt and new ones, exceed the model's {limit} {what}"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: beyond a sliding window, results would be wrong."""
        return min(self.config.context, self.config.window or self.config.context)
