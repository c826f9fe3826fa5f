"""The network: a decoder as Llama's (Touvron et al. 2023) and those that followed it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from models import DTYPES, Array, Linear, ModelError, choose_array_module, flat

from llama import gguf, ops
from llama.cache import CACHES, Cache, attend, make_cache
from llama.checkpoint import Checkpoint
from llama.config import Config, read_config
from llama.experts import Experts
from llama.perceptron import Perceptron
from llama.tensors import (
    DOWN,
    EMBEDDING,
    GATE_UP,
    HEAD,
    LAST_NORM,
    LLAMA_NORMS,
    POST_NORMS,
    PRE_NORMS,
    read_experts,
    tensor_shapes,
)


class Layer(NamedTuple):
    """One decoder layer: attention and a perceptron or several, of what was normed, and added.

    Where there are post norms, what they give is normed, too, before it is added.
    """

    attention_norm: Array
    qkv: Linear
    qk_norm: Array | None
    sinks: Array | None
    output: Linear
    mlp_norm: Array
    mlp: Perceptron | Experts
    attention_post_norm: Array | None

    def __call__(self, number: int, x: Array, cache: Cache, config: Config, xp: Any) -> None:
        """Add what the layer makes of `x`, (tokens, hidden) float32, to it."""
        c, dtype = config, self.output.dtype
        qkv = ops.product(self.qkv, ops.rms_norm(x, self.attention_norm, c.eps, dtype), dtype)
        heads = qkv.reshape(len(x), -1, c.head_dim)
        if self.qk_norm is not None:
            qk = heads[:, : c.heads + c.kv_heads]
            ops.rms_norm_inplace(qk, self.qk_norm, c.eps)
        by_sequence = heads.reshape(len(cache), -1, *heads.shape[1:]).swapaxes(1, 2)
        q, k, v = (
            by_sequence[:, first:end]
            for first, end in (
                (0, c.heads),
                (c.heads, c.heads + c.kv_heads),
                (c.heads + c.kv_heads, None),
            )
        )
        attended = xp.empty((len(x), c.heads * c.head_dim), dtype)
        out = attended.reshape(len(cache), -1, c.heads, c.head_dim).swapaxes(1, 2)
        attend(cache, number, c.attentions[number], self.sinks, q, k, v, out)
        ops.add_product(x, self.output, attended, self.attention_post_norm, c.eps)
        self.mlp.add_to(x, ops.rms_norm(x, self.mlp_norm, c.eps, dtype))

    def is_capturable(self, tokens: int) -> bool:
        """Return whether a number of tokens pass it by kernels that a CUDA graph can hold."""
        dense = all(flat.takes(each.weight, tokens) for each in (self.qkv, self.output))
        return dense and self.mlp.is_capturable(tokens)


class Llama:
    """A decoder of a Hugging Face folder or a GGUF file.

    Parameters
    ----------
    path : Path
        Path of a folder with config.json and safetensors, or of a GGUF file.
    device : {"auto", "cpu", "gpu"}
        Where it runs; "auto" prefers the GPU.
    dtype : {"auto", "float32", "float16", "bfloat16"}
        The dtype of matrices, keys and values; the rest is float32. "auto" is float32 on the CPU
        and the checkpoint's own on a GPU.
    cache : {"auto", "fp8", "int8"}
        How caches hold keys and values: "auto" is in that dtype.

    Attributes
    ----------
    xp : module
        `numpy` or `cupy`.
    config : Config
    matrices : dict
        Matrices of the layers, the embedding and the head, without those of experts, as views, by
        the names of `tensor_shapes`.
    idle : Decoder or None
        The last decoder, if nobody uses it.

    Raises
    ------
    ModelError
        The folder or file is damaged or holds another kind of model, a package is missing, or
        there is no GPU and one was asked for.
    ValueError
        `device`, `dtype` or `cache` is unknown.
    """

    def __init__(
        self, path: Path, device: str = "auto", dtype: str = "auto", cache: str = "auto"
    ) -> None:
        if cache not in CACHES:
            raise ValueError(f"cache must be one of {', '.join(CACHES)}, not {cache!r}")
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
        self.xp = choose_array_module(device)
        self.config, checkpoint = _opened(path)
        if dtype == "auto":
            dtype = "float32" if self.xp is np else self.config.dtype
        self._dtype = DTYPES[dtype]
        self._cache_dtype: np.dtype | str = self._dtype if cache == "auto" else cache
        if self.xp is not np and cache != "auto" and dtype == "float32":
            raise ModelError(
                f"a cache of {cache} on a GPU needs a model of float16 or bfloat16, not float32: "
                "name one as dtype"
            )
        shapes = tensor_shapes(self.config)
        if self.config.tied and HEAD in checkpoint:
            shapes[HEAD] = shapes[EMBEDDING]
        checkpoint.check(shapes)
        if HEAD in shapes and self.config.tied:
            is_same = np.array_equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING))
            self.config = replace(self.config, tied=is_same)
        self._take(checkpoint.read)

    @classmethod
    def of_tensors(
        cls, config: Config, read: Callable[[str], Array], xp: Any, dtype: np.dtype
    ) -> "Llama":
        """Make a decoder of tensors that are in no folder.

        Parameters
        ----------
        config : Config
        read : callable
            Returns a tensor by a name of `tensor_shapes`, of NumPy or `xp`.
        xp : module
            `numpy` or `cupy`.
        dtype : numpy.dtype
        """
        model = cls.__new__(cls)
        model.xp, model.config, model._dtype = xp, config, dtype
        model._cache_dtype = dtype
        model._take(read)
        return model

    def _take(self, read: Callable[[str], Array]) -> None:
        """Build the layers of the tensors that `read` gives by name."""
        shapes = tensor_shapes(self.config)

        self.matrices: dict[str, Array] = {}
        self.idle: Any = None

        def vector(name: str) -> Array:
            return self.xp.asarray(read(name).astype(np.float32))

        def norm(name: str) -> Array:
            weight = vector(name)
            weight += np.float32(self.config.norm_offset)
            return weight

        def linear(names: Sequence[str], biases: Sequence[str] = ()) -> Linear:
            found = Linear(
                self.xp,
                self._dtype,
                [read(name) for name in names],
                [read(name) for name in biases] or None,
            )
            start = 0
            for name in names:
                end = start + shapes[name][0]
                self.matrices[name] = found.weight[start:end]
                start = end
            return found

        def dense(at: str, *names: str) -> Linear:
            biases = [f"{at}.{name}.bias" for name in names if f"{at}.{name}.bias" in shapes]
            return linear([f"{at}.{name}.weight" for name in names], biases)

        def qk_norm(at: str) -> Array | None:
            if not self.config.qk_norm:
                return None
            heads = (self.config.heads, self.config.kv_heads)
            weights = [
                self.xp.broadcast_to(norm(f"{at}.{name}.weight"), (n, self.config.head_dim))
                for name, n in zip(("q_norm", "k_norm"), heads, strict=True)
            ]
            return self.xp.ascontiguousarray(self.xp.concatenate(weights))

        def perceptron(at: str, post_norm: Array | None) -> Perceptron:
            c = self.config
            gate_up, down = dense(at, "gate_proj", "up_proj"), dense(at, "down_proj")
            return Perceptron(gate_up, down, c.gate, post_norm, c.eps)

        def stacked(tensor: str, parts: int) -> Linear:
            """Rows of the parts take turns in the checkpoint; here, the parts follow each other."""
            # Unpacked and transposed where the model runs, which a GPU does faster.
            matrices = read_experts(
                lambda name: self.xp.asarray(read(name)), tensor, self.config.packed
            )
            weights, biases = (
                [each[part::parts] for each in of_experts for part in range(parts)]
                for of_experts in (matrices, read(f"{tensor}_bias"))
            )
            return Linear(self.xp, self._dtype, weights, biases)

        def experts(at: str) -> Experts:
            return Experts(
                router=dense(at, "router"),
                gate_up=stacked(f"{at}.experts.{GATE_UP}", 2),
                down=stacked(f"{at}.experts.{DOWN}", 1),
                chosen=self.config.chosen,
                gate=self.config.gate,
            )

        def post_norm(name: str) -> Array | None:
            return norm(name) if self.config.post_norms else None

        embedding = linear([EMBEDDING])
        self._embedding = embedding.weight
        self._head = embedding if self.config.tied else linear([HEAD])
        self._norm = norm(LAST_NORM)
        self._layers = []
        attention_norm, mlp_norm = PRE_NORMS if self.config.post_norms else LLAMA_NORMS
        for i in range(self.config.layers):
            at = f"model.layers.{i}"
            self._layers.append(
                Layer(
                    attention_norm=norm(f"{at}.{attention_norm}.weight"),
                    qkv=dense(f"{at}.self_attn", "q_proj", "k_proj", "v_proj"),
                    qk_norm=qk_norm(f"{at}.self_attn"),
                    sinks=vector(f"{at}.self_attn.sinks") if self.config.sinks else None,
                    output=dense(f"{at}.self_attn", "o_proj"),
                    mlp_norm=norm(f"{at}.{mlp_norm}.weight"),
                    mlp=experts(f"{at}.mlp")
                    if self.config.experts
                    else perceptron(f"{at}.mlp", post_norm(f"{at}.{POST_NORMS[1]}.weight")),
                    attention_post_norm=post_norm(f"{at}.{POST_NORMS[0]}.weight"),
                )
            )

    def cache(self, capacities: Sequence[int], page_size: int | None = None) -> Cache:
        """Return an empty cache for sequences of a number of tokens at most, see `make_cache`."""
        return make_cache(self.xp, self.config, self._cache_dtype, capacities, page_size)

    def extend(self, cache: Cache, ids: Array) -> Array:
        """Append tokens to the sequences of a cache.

        Parameters
        ----------
        cache : Cache
            Or a view of some of its sequences.
        ids : array, (sequences, tokens of each)
            Token numbers, in an array of the module `xp`.

        Returns
        -------
        array, (sequences, tokens of each, hidden), float32
            Hidden states, as `logits` takes them.
        """
        cache.extend(ids.shape[1])
        return self.states(cache, ids)

    def states(self, cache: Cache, ids: Array) -> Array:
        """Return the same of tokens for which the cache has been extended.

        On a GPU this can be captured into a CUDA graph where `is_capturable` says so.
        """
        x = self._embedding[ids.reshape(-1)].astype(np.float32)
        if self.config.embedding_scale is not None:
            # Rounded as the embedding is: so these models were trained.
            x *= np.float32(self._dtype.type(self.config.embedding_scale))
        for number, layer in enumerate(self._layers):
            layer(number, x, cache, self.config, self.xp)
        return x.reshape(*ids.shape, -1)

    def logits(self, states: Array) -> Array:
        """Return (n, vocabulary) float32 of the states (n, hidden) of n tokens."""
        normed = ops.rms_norm(states, self._norm, self.config.eps, self._dtype)
        logits = ops.product(self._head, normed, np.dtype(np.float32))
        cap = self.config.logit_softcap
        return logits if cap is None else ops.softcapped(logits, cap)

    def is_capturable(self, tokens: int) -> bool:
        """Return whether `tokens` pass the network by kernels that a CUDA graph can hold."""
        head = flat.takes(self._head.weight, tokens)
        return head and all(layer.is_capturable(tokens) for layer in self._layers)

    def check_length(self, tokens: int) -> None:
        """Raise ModelError if a sequence has more tokens than the model takes."""
        limit = self.longest
        if tokens > limit:
            raise ModelError(
                f"{tokens} tokens, of the prompt and new ones, exceed the model's {limit} positions"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.config.context


def _opened(path: Path) -> tuple[Config, Checkpoint | gguf.GgufCheckpoint]:
    if path.is_file():
        file = gguf.GgufFile(path)
        config = gguf.read_config(file)
        return config, gguf.GgufCheckpoint(file, config)
    return read_config(path), Checkpoint(path)
