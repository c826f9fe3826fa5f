"""Random arguments of the features whose arguments are plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cufa.features import VALUES


class Drawing(NamedTuple):
    """How an argument is drawn.

    Attributes
    ----------
    likely : float
        How likely a call has it.
    draw : callable
        A random generator, queries and keys -> the argument.
    """

    likely: float
    draw: Callable[[np.random.Generator, int, int], Any]


def _window(rng: np.random.Generator, seq_q: int, seq_kv: int) -> Any:
    """Draw bounds: none, a near one or a far one."""
    far = rng.integers(0, max(seq_q, seq_kv) + 1, 2).tolist()
    near = rng.integers(0, 20, 2).tolist()
    choices = ((None, *at) for at in zip(near, far, strict=True))
    left, right = (each[rng.integers(len(each))] for each in choices)
    return left, right


def _chunk(rng: np.random.Generator, seq_q: int, seq_kv: int) -> int:
    """Draw a size: a few keys, or up to more than there are."""
    return int(rng.integers(1, [20, 20, seq_kv + 20][rng.integers(3)]))


def _one_of(*values: Any) -> Callable[[np.random.Generator, int, int], Any]:
    return lambda rng, _seq_q, _seq_kv: values[rng.integers(len(values))]


DRAWINGS = {
    "softcap": Drawing(0.3, _one_of(0.05, 1.0, 5.0, 20.0, 50.0, 1000.0)),
    "causal": Drawing(0.5, _one_of(True, True, "top-left")),
    "window": Drawing(0.3, _window),
    "attention_chunk": Drawing(0.3, _chunk),
    "dropout_p": Drawing(0.2, _one_of(0.1, 0.5)),
}
assert DRAWINGS.keys() == VALUES.keys()
