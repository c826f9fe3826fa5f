"""An expression -> the expression of its derivative, operation by operation.

By the rules of calculus, from the leaves to the root. Where an operation has a kink, the derivative
is that of the side whose value it takes; what rounds, compares or counts has the derivative 0.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cufa.features.expression.graph import FLOAT, Graph
from cufa.features.expression.values import Value

_LN_2, _LN_10 = math.log(2), math.log(10)


def derivative(graph: Graph, root: int, leaf: int) -> int:
    """Return the node of the derivative of one node by another, a float.

    Parameters
    ----------
    graph : Graph
        Gets the nodes of the derivative; equal nodes are shared with the expression.
    root : int
        The node that is differentiated.
    leaf : int
        The node that it is differentiated by: the score, or an element of an array.
    """
    slopes: dict[int, Value | None] = {}  # None for 0
    for i in graph.reachable(root):
        node = graph.nodes[i]
        inner = [slopes[j] for j in node.operands]
        slopes[i] = None
        if i == leaf:
            slopes[i] = Value(graph, graph.constant(1.0))
        elif node.kind == FLOAT and any(slope is not None for slope in inner):
            values = (Value(graph, j) for j in (i, *node.operands))
            slopes[i] = _slope(node.name, inner, *values)
    slope = slopes[root]
    return graph.constant(0.0) if slope is None else slope.node


def _slope(name: str, inner: list[Value | None], value: Value, *operands: Value) -> Value | None:
    """Return the slope of a node from those of its operands, at least one of which is not 0."""
    if name == "cast":
        return inner[0]
    if name == "where":
        return _either(operands[0], inner[1], inner[2])
    if name in _CHOICES:
        return _either(_CHOICES[name](*operands), inner[0], inner[1])
    if name in _FLAT:
        return None
    factors = _FACTORS[name](value, *operands)
    pairs = zip(factors if isinstance(factors, tuple) else (factors,), inner, strict=True)
    terms = [_product(factor, slope) for factor, slope in pairs if slope is not None]
    found = [term for term in terms if term is not None]
    return functools.reduce(operator.add, found) if found else None


def _product(factor: Value | int | None, slope: Value) -> Value | None:
    """Return a product, or one factor where the other is 1; None for 0."""
    if isinstance(factor, Value):
        return factor if slope.is_one else factor * slope
    return None if factor is None else slope if factor > 0 else -slope


def _either(condition: Value, a: Value | None, b: Value | None) -> Value | None:
    """Return one of two slopes."""
    if a is not None and b is not None and a.node == b.node:
        return a
    chosen: Any = np.where(condition, *(0.0 if slope is None else slope for slope in (a, b)))
    return chosen


def _unless_zero(x: Value, slope: Value) -> Any:
    """Return a slope, or 0 where a number is 0."""
    return np.where(x == 0.0, 0.0, slope)


_CHOICES: Mapping[str, Callable[..., Any]] = {
    "maximum": np.greater,
    "minimum": np.less,
    "fmax": lambda a, b: np.logical_or(a > b, np.isnan(b)),
    "fmin": lambda a, b: np.logical_or(a < b, np.isnan(b)),
}
"""Whether the first of two operands is the value."""

_FLAT = frozenset(("sign", "rint", "floor", "ceil", "trunc", "floor_divide"))
"""Functions that are constant but for steps."""


def _of_angle(y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    square = np.square(a) + np.square(b)
    return _unless_zero(square, b / square), _unless_zero(square, -(a / square))


_FACTORS: Mapping[str, Callable[..., Any]] = {
    "add": lambda y, a, b: (1, 1),
    "subtract": lambda y, a, b: (1, -1),
    "negative": lambda y, a: -1,
    "multiply": lambda y, a, b: (b, a),
    "divide": lambda y, a, b: (1.0 / b, -(y / b)),
    # The limit at 0, where log is not finite
    "power": lambda y, a, b: (b * a ** (b - 1.0), _unless_zero(a, y * np.log(a))),
    "remainder": lambda y, a, b: (1, -(a // b)),
    "fmod": lambda y, a, b: (1, -np.trunc(a / b)),
    "hypot": lambda y, a, b: (_unless_zero(y, a / y), _unless_zero(y, b / y)),
    "arctan2": _of_angle,
    "copysign": lambda y, a, b: (np.copysign(np.sign(a), np.sign(a) * b), None),
    "absolute": lambda y, a: np.sign(a),
    "fabs": lambda y, a: np.sign(a),
    "square": lambda y, a: 2.0 * a,
    "sqrt": lambda y, a: 0.5 / y,
    "exp": lambda y, a: y,
    "exp2": lambda y, a: _LN_2 * y,
    "expm1": lambda y, a: np.exp(a),
    "log": lambda y, a: 1.0 / a,
    "log2": lambda y, a: 1 / _LN_2 / a,
    "log10": lambda y, a: 1 / _LN_10 / a,
    "log1p": lambda y, a: 1.0 / (1.0 + a),
    "sin": lambda y, a: np.cos(a),
    "cos": lambda y, a: -np.sin(a),
    "tan": lambda y, a: 1.0 + np.square(y),
    "arcsin": lambda y, a: 1.0 / np.sqrt(1.0 - np.square(a)),
    "arccos": lambda y, a: -1.0 / np.sqrt(1.0 - np.square(a)),
    "arctan": lambda y, a: 1.0 / (1.0 + np.square(a)),
    "sinh": lambda y, a: np.cosh(a),
    "cosh": lambda y, a: np.sinh(a),
    "tanh": lambda y, a: 1.0 - np.square(y),
}
"""The factors of the operands' slopes, of a value y and its operands: 1, -1 or None for 0."""
