"""derivative.py: each operation that is traced, against differences of the function in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cufa.features.expression import derivative as its
from cufa.features.expression import rules
from cufa.features.expression.derivative import derivative
from cufa.features.expression.graph import FLOAT, Graph, Node
from cufa.features.expression.tracing import derivative_of, trace
from cufa.features.parts import part_named

TABLE = np.linspace(-2, 2, 7, dtype=np.float32)
STEP = 1e-6

#: Functions of numbers between 0.1 and 0.9; `t` is of an array.
CASES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda s, t: s + 2 * s + t,
    "subtract": lambda s, t: t - s,
    "multiply": lambda s, t: s * s * t,
    "divide": lambda s, t: (s + 1) / (s * s + t * t + 1),
    "power of a constant": lambda s, t: s**3 + s**-2,
    "power": lambda s, t: np.power(s, 1.7) + np.power(1.7, s) + np.power(s, s),
    "square": lambda s, t: np.square(s - 3),
    "negative": lambda s, t: -s,
    "positive": lambda s, t: +s * t,
    "absolute": lambda s, t: abs(s - 0.51) + np.fabs(s - 2),
    "sign": lambda s, t: np.sign(s - 0.51) * s,
    "sqrt": lambda s, t: np.sqrt(s),
    "exp": lambda s, t: np.exp(s) + np.exp2(2 * s) + np.expm1(-s),
    "log": lambda s, t: np.log(s) + np.log2(s) + np.log10(s) + np.log1p(s),
    "sine": lambda s, t: np.sin(s) + np.cos(2 * s) + np.tan(s),
    "arcsine": lambda s, t: np.arcsin(s) + 2 * np.arccos(s) + np.arctan(3 * s),
    "arctan2": lambda s, t: np.arctan2(s, 1 - s) + np.arctan2(t, s),
    "sinh": lambda s, t: np.sinh(s) + np.cosh(2 * s) + np.tanh(s),
    "hypot": lambda s, t: np.hypot(s, 1 - s * t),
    "copysign": lambda s, t: np.copysign(s - 0.51, t) + np.copysign(1 - s, -1.0),
    "floor": lambda s, t: np.floor(5 * s) * s + np.ceil(5 * s) + np.trunc(5 * s) + np.rint(5 * s),
    "floor_divide": lambda s, t: (s // 0.23) * s,
    "remainder": lambda s, t: np.remainder(s, 0.23) + np.remainder(-2.0, s),
    "fmod": lambda s, t: np.fmod(s, 0.23) + np.fmod(-2.0, s),
    "maximum": lambda s, t: np.maximum(s, 0.51) + np.minimum(2 * s, s * s + 0.43),
    "fmax": lambda s, t: np.fmax(s, np.nan) + np.fmin(s, 0.51) * np.fmax(t, s),
    "clip": lambda s, t: np.clip(s, 0.31, 0.77) * s,
    "where": lambda s, t: np.where(s > 0.51, np.exp(s), t * s),
    "where only one side has a derivative": lambda s, t: np.where(s > 0.51, s, -np.inf),
    "of a test": lambda s, t: np.where(np.isnan(s) | (s != s), 3.0, s * s),
    "cast": lambda s, t: s.astype(np.float64) * (9 * s).astype(np.int32),
    "of nothing": lambda s, t: t,
}


def numbers() -> tuple[np.ndarray, np.ndarray]:
    s = np.random.default_rng(3).uniform(0.1, 0.9, (1, 1, 40, len(TABLE)))
    return s, TABLE.astype(np.float64)


@pytest.mark.parametrize("name", CASES)
def test_an_operation(name: str) -> None:
    """By central differences, where no kink is near."""
    function = CASES[name]
    of = derivative_of(lambda s, b, h, i, j: function(s, TABLE[j]))
    score, t = numbers()
    pair = np.ix_(*map(np.arange, score.shape))
    with np.errstate(all="ignore"):
        expected = (function(score + STEP, t) - function(score - STEP, t)) / (2 * STEP)
    expected = np.where(np.isnan(expected), 0, expected)  # of two infinities
    found = np.broadcast_to(of(score.astype(np.float32), *pair), score.shape) if of else 1
    near = np.broadcast_to(expected, score.shape)
    is_near = np.isclose(found, near, 3e-4, 3e-4)
    assert is_near.mean() > 0.99, name  # within a step of a kink, a difference is of both sides


def test_all_operations_of_floats_have_a_rule() -> None:
    of_floats = {name for name, (_, returned) in rules._TYPES.items() if returned == FLOAT}
    names = of_floats | {"power"} | rules._NUMERIC | rules._ROUNDINGS
    rest = {"positive"}  # which is its operand
    known = its._CHOICES.keys() | its._FACTORS.keys() | its._FLAT
    assert names - rest == known


@pytest.mark.parametrize(
    ("score_mod", "text"),
    [
        (lambda s, b, h, i, j: s - abs(i - j) * TABLE[h], None),
        (lambda s, b, h, i, j: np.where(i >= j, s, s + 1), None),
        (lambda s, b, h, i, j: s * TABLE[h], "return x0;"),
        (lambda s, b, h, i, j: np.where(i >= j, s, -np.inf), "x0 ? 0x1.0000000000000p+0f : 0x0.0p"),
        (lambda s, b, h, i, j: 3 * np.tanh(s / 3), "numpy::tanh("),
        (lambda s, b, h, i, j: np.floor(s), "return 0x0.0p+0f;"),
    ],
)
def test_the_derivative_in_cpp(score_mod: Any, text: str | None) -> None:
    """A method of the part, of a score in natural units; none where it is 1."""
    _, method, body = part_named(trace(score_mod, None).parts[0]).source.partition("float slope(")
    assert bool(method) == (text is not None)
    assert (text or "") in body


def test_limits_at_zero() -> None:
    """Where a factor is not finite and another is 0."""
    k, table = np.zeros(1, np.float32), np.full(1, 0.5, np.float32)

    def slope(of: Any) -> float:
        found = derivative_of(of)
        assert found is not None
        return float(found(k, *[np.zeros(1, np.int32)] * 4)[0])

    assert slope(lambda s, b, h, i, j: abs(i - j) ** (s + 0.5)) == 0
    assert slope(lambda s, b, h, i, j: np.hypot(s, table[j] * s)) == 0
    assert slope(lambda s, b, h, i, j: np.arctan2(s, 3 * s)) == 0


def test_by_the_elements_of_an_array() -> None:
    """Whatever is read may be what is differentiated by."""
    graph = Graph()
    score = graph.add(Node("score", FLOAT))
    element = graph.add(Node("load", FLOAT, (graph.constant(1),), array=0))
    root = rules.applied(graph, "multiply", [rules.applied(graph, "square", [score]), element])
    assert derivative(graph, root, element) == rules.applied(graph, "square", [score])
    assert derivative(graph, score, element) == graph.constant(0.0)
