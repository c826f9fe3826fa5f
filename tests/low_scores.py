"""Masks as users write them, with numbers that are very low: by a bias, a function, or both.

The right result is that of float32 arithmetic. A sum with -1e9 keeps nothing of a score of
usual size, so that a row of such sums is the mean of its keys' values; float32's lowest number
twice is -inf, which hides a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Call = tuple[np.ndarray, np.ndarray, np.ndarray]
Options = dict[str, Any]
Shape = tuple[int, int]

LOWEST = float(np.finfo(np.float32).min)
#: -3.3895e38 is bfloat16's lowest number.
VALUES = (-1e9, -1e30, -3.3895313892515355e38, LOWEST, -np.inf)

#: Without bits beyond those of float16.
TOLERANCES = {"float16": 2e-3, "bfloat16": 1.5e-2, "float32": 1e-5}


def is_low(i: Any, j: Any) -> Any:
    """Whether a pair is hidden: all of some rows, some of others, and the first keys of all."""
    return (i % 7 == 3) | ((j % 3 == 0) & (i % 2 == 0)) | (j < 9)


def is_low_row(i: Any, j: Any) -> Any:
    """Whether a pair is in such a row: what is added is the same for all keys."""
    return (i % 7 == 3) | (j < 0)


def by_bias(value: float, shape: Shape, on: Any) -> Options:
    i, j = np.ix_(*map(np.arange, shape))
    return {"bias": on(np.where(is_low(i, j), np.float32(value), np.float32(0)))}


def by_function(value: float, shape: Shape, on: Any) -> Options:
    low = on(np.full(1, value, np.float32))
    return {"score_mod": lambda s, b, h, i, j: s + np.where(is_low(i, j), low[0], 0)}


def in_place_of_scores(value: float, shape: Shape, on: Any) -> Options:
    low = on(np.full(1, value, np.float32))
    return {"score_mod": lambda s, b, h, i, j: np.where(is_low(i, j), low[0], s)}


def by_function_of_rows(value: float, shape: Shape, on: Any) -> Options:
    low = on(np.full(1, value, np.float32))
    return {"score_mod": lambda s, b, h, i, j: s + np.where(i % 7 == 3, low[0], 0)}


def by_both(value: float, shape: Shape, on: Any) -> Options:
    return by_bias(value, shape, on) | by_function(value, shape, on)


def by_halves(value: float, shape: Shape, on: Any) -> Options:
    return by_both(value / 2, shape, on)


#: Way -> what is added to the scores that it changes, and where.
WAYS: dict[Callable[..., Options], tuple[Callable[[np.float32], Any], Callable[..., Any]]] = {
    by_bias: (lambda value: value, is_low),
    by_function: (lambda value: value, is_low),
    in_place_of_scores: (lambda value: value, is_low),
    by_function_of_rows: (lambda value: value, is_low_row),
    by_both: (lambda value: value + value, is_low),
    by_halves: (lambda value: value, is_low),
}


def expected(arrays: Call, way: Any, value: float, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return result and log-sum-exp: scores in float32, and float64 from there on."""
    q, k, v = (x.astype(np.float64) for x in arrays)
    group, (sq, sk) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = (q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5).astype(np.float32)
    added, where = WAYS[way]
    i, j = np.ix_(np.arange(sq), np.arange(sk))
    with np.errstate(over="ignore"):
        low = added(np.float32(value))
    scores = np.where(where(i, j), low if way is in_place_of_scores else scores + low, scores)
    if causal:
        scores = np.where(j > i + sk - sq, -np.inf, scores)
    scores = scores.astype(np.float64)
    m = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(m == -np.inf, 0, m))
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(total))[..., 0]
    return weights / np.where(total == 0, 1, total) @ v, lse


def assert_right(out: Any, lse: Any, arrays: Call, way: Any, value: float, causal: bool) -> None:
    """Assert that a result and its log-sum-exp are as `expected`."""
    right, right_lse = expected(arrays, way, value, causal)
    tolerance = TOLERANCES[arrays[0].dtype.name]
    what = f"{way.__name__} {value} {'causal' if causal else ''}"
    np.testing.assert_allclose(out.astype(np.float64), right, 0, tolerance, err_msg=what)
    np.testing.assert_array_equal(lse == -np.inf, right_lse == -np.inf, err_msg=what)
    seen = right_lse > -np.inf
    np.testing.assert_allclose(lse[seen], right_lse[seen], 1e-6, 1e-3, err_msg=what)
