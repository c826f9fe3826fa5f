"""Arrays next to q, k and v for tests: those that calls of some sizes may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Sizes = tuple[int, int, int, int, int]
"""Batch, heads of q and of K/V, queries, keys."""


def slopes(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    return rng.random(sizes[1], np.float32)


def slopes_of_sequences(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    return rng.standard_normal((sizes[0], sizes[1]), np.float32)[:, ::-1] * 0.1


def sinks(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    return 3 * rng.standard_normal(sizes[1], np.float32)


def bias(rng: np.random.Generator, sizes: Sizes, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    b, hq, _, sq, sk = sizes
    return (2 * rng.standard_normal((b, hq, sq, sk), np.float32)).astype(dtype)


def shared_bias(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """Draw one of all sequences; neighbours along its keys are not so in memory."""
    return bias(rng, (1, *sizes[1:]), np.float16).swapaxes(2, 3).copy().swapaxes(2, 3)


def bias_of_keys(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """Draw one that hides some, -inf, whatever the query is."""
    found = bias(rng, sizes, np.float32)[:, :1, :1]
    found[..., rng.random(sizes[4]) < 0.3] = -np.inf
    return found


def mask(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """Draw one with rows that see no key, and keys that none sees."""
    b, _, _, sq, sk = sizes
    found = rng.random((b, 1, sq, sk)) < 0.4
    found[:, :, sq // 2], found[:, :, :, sk // 2 : sk // 2 + 70] = False, False
    return found


def padding(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """Draw one that hides the keys beyond a sequence's end."""
    return np.arange(sizes[4]) < rng.integers(1, sizes[4] + 1, (sizes[0], 1, 1, 1))


def bits(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    return np.packbits(rng.random((sizes[1], *sizes[3:])) < 0.5, axis=-1)


Features = dict[str, tuple[dict[str, Callable[..., np.ndarray]], dict[str, Any]]]

FEATURES: Features = {
    "alibi": ({"alibi_slopes": slopes}, {"causal": True}),
    "alibi of sequences": ({"alibi_slopes": slopes_of_sequences}, {}),
    "sinks": ({"sinks": sinks}, {}),
    "sinks and window": ({"sinks": sinks}, {"causal": True, "window": (50, None)}),
    "bias": ({"bias": bias}, {}),
    "shared bias": ({"bias": shared_bias}, {"causal": True}),
    "bias of keys": ({"bias": bias_of_keys}, {}),
    "mask": ({"mask": mask}, {}),
    "padding": ({"mask": padding}, {"causal": "top-left"}),
    "bits": ({"mask": bits}, {}),
    "all": (
        {"alibi_slopes": slopes, "bias": shared_bias, "mask": mask, "sinks": sinks},
        {"causal": True, "softcap": 5.0, "window": (200, None)},
    ),
}
"""Arguments, made for sizes, and others."""

DECODE_FEATURES: Features = {
    "window": ({}, {"window": (40, None)}),
    "window of both ends": ({}, {"window": (30, 1), "causal": False}),
    "window ahead": ({}, {"window": (2, 9), "causal": False}),
    "chunk": ({}, {"attention_chunk": 50}),
    "chunk and window": ({}, {"attention_chunk": 90, "window": (20, None)}),
    "softcap": ({}, {"softcap": 2.0}),
    "alibi": ({"alibi_slopes": slopes}, {}),
    "alibi of sequences": ({"alibi_slopes": slopes_of_sequences}, {"causal": False}),
    "sinks": ({"sinks": sinks}, {}),
    "all": (
        {"alibi_slopes": slopes_of_sequences, "sinks": sinks},
        {"softcap": 5.0, "window": (50, 0)},
    ),
}
"""The same of `decode`."""


def options_of(
    rng: np.random.Generator, name: str, sizes: Sizes, features: Features = FEATURES
) -> dict[str, Any]:
    """Return the options of a call: NumPy arrays, and others."""
    arrays, others = features[name]
    return {argument: make(rng, sizes) for argument, make in arrays.items()} | others


PAIRS = ("bias of 16 bits", "bias of 32 bits", "mask", "mask of bits")
"""Kinds of arrays with a number for each query and key."""


def pairs(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw one; some rows see no key."""
    if kind.startswith("bias"):
        found = 2 * rng.standard_normal(shape, np.float32)
        found[rng.random(shape) < 0.1] = -np.inf
        return found.astype(ml_dtypes.bfloat16 if "16" in kind else np.float32)
    seen = rng.random(shape) < 0.4
    seen[..., shape[2] // 2, :] = False
    return np.packbits(seen, axis=-1) if kind == "mask of bits" else seen


Place = Callable[[np.ndarray], Any]
"""Copies an array to a device."""


def _in_rows_of(columns: int, first: int, step: int = 1) -> Callable[[Place, np.ndarray], Any]:
    """Return a function that places an array in one whose rows are longer."""

    def placed(place: Place, x: np.ndarray) -> Any:
        last = first + step * x.shape[-1]
        wide = np.zeros((*x.shape[:-1], -(-last // columns) * columns), x.dtype)
        wide[..., first:last:step] = x
        return place(wide)[..., first:last:step]

    return placed


LIES: dict[str, Callable[[Place, np.ndarray], Any]] = {
    "dense": lambda place, x: place(x),
    "rows of whole chunks": _in_rows_of(16, 0),
    "rows that begin a chunk late": _in_rows_of(16, 16),
    "rows that begin an element late": _in_rows_of(16, 1),
    "rows of odd lengths": _in_rows_of(17, 0),
    "every other element": _in_rows_of(16, 0, 2),
    "backwards": lambda place, x: place(x[..., ::-1].copy())[..., ::-1],
    "queries next to each other": lambda place, x: place(x.swapaxes(2, 3).copy()).swapaxes(2, 3),
    "heads next to each other": lambda place, x: place(x.swapaxes(1, 3).copy()).swapaxes(1, 3),
}
"""Ways in which an array can lie in memory."""
