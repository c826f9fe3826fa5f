"""`score_mod` and `mask_mod` for tests: what calls of some sizes may have.

Each is made of arrays, so that it can be had of those of the host and of those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from score_arrays import Sizes

Arrays = dict[str, Any]
Options = dict[str, Any]

WINDOW = 50


def no_arrays(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    return {}


def slopes(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    """Draw slopes that leave scores of some tens: float32 has 2^-17 of a hundred.

    There, the units in which scores are rounded would decide.
    """
    return {"slopes": rng.random(2 * sizes[1], np.float32)[::2] / 8}


def alibi(arrays: Arrays) -> Options:
    slopes = arrays["slopes"]
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: score - slopes[h] * abs(q_idx - kv_idx)}


def even_steps(arrays: Arrays) -> Options:
    """Make one that grows evenly from key to key."""
    slopes = arrays["slopes"]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx) / 32

    return {"score_mod": score_mod}


def two_distances(arrays: Arrays) -> Options:
    """Make one that turns where a query does not stand; ALiBi turns where it stands."""
    slopes = arrays["slopes"]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * np.abs(2 * kv_idx - q_idx - 40) / 64

    return {"score_mod": score_mod, "alibi_slopes": slopes}


def table(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    return {"table": rng.standard_normal((63, sizes[1])).astype(np.float16).T}


def relative_positions(arrays: Arrays) -> Options:
    table = arrays["table"]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, np.clip(q_idx - kv_idx, -31, 31) + 31]

    return {"score_mod": score_mod, "causal": "top-left"}


def documents(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    b, _, _, sq, sk = sizes
    return {"documents": np.sort(rng.integers(-2, 4, (b, max(sq, sk)))) << 40}


def document_mask(arrays: Arrays) -> Options:
    documents = arrays["documents"]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (documents[b, q_idx] == documents[b, kv_idx]) & (q_idx >= kv_idx)

    return {"mask_mod": mask_mod}


def sliding_window(arrays: Arrays) -> Options:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return np.logical_and(q_idx >= kv_idx, q_idx - kv_idx <= WINDOW)

    return {"mask_mod": mask_mod}


def prefixes(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    return {"prefixes": rng.integers(0, sizes[4] + 1, sizes[0]).astype(np.int16)}


def prefix_lm(arrays: Arrays) -> Options:
    prefixes = arrays["prefixes"]
    return {"mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx < prefixes[b]) | (kv_idx <= q_idx)}


def soft_capping(arrays: Arrays) -> Options:
    return {"score_mod": lambda score, *_: 3 * np.tanh(score / 3), "causal": True}


def of_other_functions(arrays: Arrays) -> Options:
    """Make one of many, which stand in a list; it takes its scores from few keys."""

    def helped(h: Any) -> Any:
        return np.exp2(-(h + 1) / 4)

    steps = [lambda x, i=i: x * (1 - 0.1 * i) for i in range(3)]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for step in steps:
            score = step(score)
        score += np.where((q_idx - kv_idx) // 7 % 3 == 1, helped(h), np.sin(kv_idx / 9) - b)
        return np.where((q_idx + kv_idx) % 5 == 0, -np.inf, np.minimum(score, 4.5))

    return {"score_mod": score_mod}


def any_of_all(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    _, hq, _, sq, sk = sizes
    return {
        **slopes(rng, sizes),
        **documents(rng, sizes),
        "alibi_slopes": rng.random(hq, np.float32),
        "bias": rng.standard_normal((hq, 1, sk), np.float32).astype(np.float16),
        "mask": rng.random((sq, sk)) < 0.8,
        "sinks": rng.standard_normal(hq, np.float32),
        "strength": np.float32(1.5).reshape(()),
    }


def all_at_once(arrays: Arrays) -> Options:
    slopes, documents, strength = (arrays[name] for name in ("slopes", "documents", "strength"))
    given = {name: arrays[name] for name in ("alibi_slopes", "bias", "mask", "sinks")}

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return strength * np.abs(score) - slopes[-1 - h] * np.sqrt(kv_idx)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[b, q_idx] <= documents[b, kv_idx]

    return {
        **given,
        **{"score_mod": score_mod, "mask_mod": mask_mod, "softcap": 5.0, "scale": -0.3},
        **{"causal": True, "window": (200, None)},
    }


FEATURES: dict[str, tuple[Callable[..., Arrays], Callable[[Arrays], Options]]] = {
    "alibi": (slopes, alibi),
    "even steps": (slopes, even_steps),
    "two distances": (slopes, two_distances),
    "relative positions": (table, relative_positions),
    "documents": (documents, document_mask),
    "sliding window": (no_arrays, sliding_window),
    "prefix": (prefixes, prefix_lm),
    "softcap": (no_arrays, soft_capping),
    "functions of functions": (no_arrays, of_other_functions),
    "all": (any_of_all, all_at_once),
}
"""Arrays, made for sizes, and the options of a call that are made of them."""


def made(
    rng: np.random.Generator, name: str, sizes: Sizes, there: Callable[[np.ndarray], Any]
) -> tuple[Options, Options]:
    """Return the options of a call, of arrays of the host and of the same ones elsewhere."""
    draw, make = FEATURES[name]
    arrays = draw(rng, sizes)
    return make(arrays), make({name: there(array) for name, array in arrays.items()})
