"""The network: a BERT encoder of 6 layers whose last hidden states are averaged.

BERT is by Devlin et al. (2018); the weights were distilled as MiniLM (Wang et al. 2020) and then
trained for sentence similarity as in Sentence-BERT (Reimers and Gurevych 2019).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from models import DTYPES, Array, Linear, choose_array_module

import cufa
from minilm.files import load_tokenizer, load_weights, model_folder
from minilm.ops import gelu, layer_norm

LAYERS = 6
HEADS = 12
DIM = 384

# Tokens a batch: what fills the device and no more. On the CPU a larger batch falls out of the
# caches; on a GPU a smaller one leaves it idle between launches.
BATCH_TOKENS_CPU = 4096
BATCH_TOKENS_GPU = 65536


class Norm(NamedTuple):
    """The weight and bias of `layer_norm`, in its order."""

    weight: Array
    bias: Array


class Layer(NamedTuple):
    """One encoder layer: attention and a two-layer perceptron, each added and then normalised."""

    qkv: Linear
    projection: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm
    dtype: np.dtype

    def __call__(self, x: Array, offsets: Array) -> Array:
        """Return the layer's output, (tokens, DIM) float32 like its input `x`.

        Sentence i has the tokens from offsets[i] to offsets[i + 1] - 1.
        """
        qkv = self.qkv(x).astype(self.dtype, copy=False)
        # Views into one array: (tokens, heads, head_dim) each, nothing is copied.
        q, k, v = qkv.reshape(len(x), 3, HEADS, DIM // HEADS).transpose(1, 0, 2, 3)
        attended = cufa.attention_varlen(q, k, v, offsets, offsets).reshape(len(x), DIM)
        x = layer_norm(x + self.projection(attended), *self.attention_norm)
        hidden = gelu(self.up(x))
        return layer_norm(x + self.down(hidden), *self.output_norm)


class MiniLM:
    """Sentence embeddings by all-MiniLM-L6-v2.

    Parameters
    ----------
    device : {"auto", "cpu", "gpu"}
        Where it runs; "auto" prefers the GPU.
    dtype : {"float32", "float16", "bfloat16"}
        The dtype of the weights' matrices and of attention; the rest is float32.

    Attributes
    ----------
    xp : module
        `numpy` or `cupy`: the kind of array that `encode` returns.

    Raises
    ------
    ModelError
        A package or the weights are missing, the weights are not the recorded ones, or there is
        no GPU and one was asked for.
    ValueError
        `device` or `dtype` is unknown.
    """

    def __init__(self, device: str = "auto", dtype: str = "float32") -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        self.xp = choose_array_module(device)
        self._batch_tokens = BATCH_TOKENS_CPU if self.xp is np else BATCH_TOKENS_GPU
        folder = model_folder()
        self._tokenizer = load_tokenizer(folder)
        weights = load_weights(folder)

        def vector(name: str) -> Array:
            return self.xp.asarray(weights[name].astype(np.float32))

        def norm(name: str) -> Norm:
            return Norm(vector(f"{name}.weight"), vector(f"{name}.bias"))

        def dense(*names: str) -> Linear:
            # Several layers of one input become one.
            matrices = [weights[f"{name}.weight"] for name in names]
            biases = [weights[f"{name}.bias"] for name in names]
            return Linear(self.xp, DTYPES[dtype], matrices, biases)

        self._words = vector("embeddings.word_embeddings.weight")
        # Every token is of type 0, so that type's vector is added to the positions once.
        self._positions = (
            vector("embeddings.position_embeddings.weight")
            + vector("embeddings.token_type_embeddings.weight")[0]
        )
        self._embedding_norm = norm("embeddings.LayerNorm")
        self._layers = []
        for i in range(LAYERS):
            at = f"encoder.layer.{i}"
            self._layers.append(
                Layer(
                    qkv=dense(*(f"{at}.attention.self.{n}" for n in ("query", "key", "value"))),
                    projection=dense(f"{at}.attention.output.dense"),
                    attention_norm=norm(f"{at}.attention.output.LayerNorm"),
                    up=dense(f"{at}.intermediate.dense"),
                    down=dense(f"{at}.output.dense"),
                    output_norm=norm(f"{at}.output.LayerNorm"),
                    dtype=DTYPES[dtype],
                )
            )

    def encode(
        self, sentences: Sequence[str], progress: Callable[[int], Any] | None = None
    ) -> Array:
        """Return one embedding a sentence: the mean of its last hidden states, of length 1.

        A sentence is cut after 256 tokens, as the model's configuration says. Sentences of a
        batch follow each other, so none is padded and none sees another.

        Parameters
        ----------
        sentences : sequence of str
            May be empty; so may a sentence.
        progress : callable, optional
            Called with the number of sentences done since the last call.

        Returns
        -------
        array, (len(sentences), 384), float32
            Embeddings, in an array of `xp`. The dot product of two rows is their cosine similarity.

        Raises
        ------
        TypeError
            `sentences` is one string, or holds something that is none.
        """
        if isinstance(sentences, str):
            raise TypeError("sentences must be a sequence of strings, not one string")
        encodings = self._tokenizer.encode_batch(list(sentences))
        tokens = [encoding.ids for encoding in encodings]
        result = self.xp.empty((len(tokens), DIM), np.float32)
        for rows in self._batches([len(ids) for ids in tokens]):
            result[self.xp.asarray(rows)] = self._embed([tokens[row] for row in rows])
            if progress is not None:
                progress(len(rows))
        return result

    def _batches(self, lengths: list[int]) -> Iterator[np.ndarray]:
        """Yield row numbers by token count, at most the device's batch of tokens at a time."""
        rows = np.argsort(np.array(lengths, np.int64), kind="stable")
        start = tokens = 0
        for end, row in enumerate(rows):
            if end > start and tokens + lengths[row] > self._batch_tokens:
                yield rows[start:end]
                start, tokens = end, 0
            tokens += lengths[row]
        if len(rows) > start:
            yield rows[start:]

    def _embed(self, sentences: Sequence[Sequence[int]]) -> Array:
        """Return the embeddings, (sentences, DIM) float32, of token ids."""
        xp, lengths = self.xp, np.array([len(ids) for ids in sentences])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        ids = xp.asarray(np.concatenate(sentences))
        x = layer_norm(
            self._words[ids] + self._positions[xp.asarray(positions)], *self._embedding_norm
        )
        there = xp.asarray(offsets)
        for layer in self._layers:
            x = layer(x, there)
        mean = xp.add.reduceat(x, there[:-1], axis=0) / xp.asarray(lengths[:, None], np.float32)
        return mean / (mean * mean).sum(axis=-1, keepdims=True) ** 0.5
