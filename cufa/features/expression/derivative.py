"""An expression -> the expression of its derivative, operation by operation.

By the rules of calculus, from the leaves to the root. Where an operation has a kink, the derivative
is that of the side whose value it takes; what rounds, compares or counts has the derivative 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from cufa.features.expression.graph import BOOL, FLOAT, Graph
from cufa.features.expression.rules import applied, where

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
    slopes: dict[int, int | None] = {}  # None for 0
    for i in graph.reachable(root):
        node = graph.nodes[i]
        if i == leaf:
            slopes[i] = graph.constant(1.0)
        elif node.kind != FLOAT or all(slopes[j] is None for j in node.operands):
            slopes[i] = None
        else:
            slopes[i] = _slope(graph, i, [slopes[j] for j in node.operands])
    slope = slopes[root]
    return graph.constant(0.0) if slope is None else slope


def _slope(graph: Graph, i: int, inner: list[int | None]) -> int | None:
    """Return the slope of a node from those of its operands, at least one of which is not 0."""
    node, do = graph.nodes[i], _Terms(graph)
    if node.name == "cast":
        return inner[0]
    if node.name == "where":
        condition, *_ = node.operands
        return do.either(condition, inner[1], inner[2])
    if node.name in _CHOICES:
        a, b = node.operands
        return do.either(_CHOICES[node.name](do, a, b), *inner)
    if node.name in _FLAT:
        return None
    if node.name in _SUMS:
        terms = (
            None if slope is None else slope if sign > 0 else do("negative", slope)
            for sign, slope in zip(_SUMS[node.name], inner, strict=True)
        )
        return do.total(*terms)
    factors = _FACTORS[node.name](do, i, *node.operands)
    return do.total(
        *(
            None if slope is None or factor is None else do.times(factor(), slope)
            for factor, slope in zip(factors, inner, strict=True)
        )
    )


class _Terms:
    """The operations that derivatives are written with: calls add nodes to a graph.

    Parameters
    ----------
    graph : Graph
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __call__(self, function: str, *operands: int | float) -> int:
        """Apply one of NumPy's functions; Python's numbers are constants."""
        nodes = [self.number(x) if isinstance(x, float) else x for x in operands]
        return applied(self._graph, function, nodes)

    def number(self, x: float) -> int:
        """Return a constant."""
        return self._graph.constant(float(x), FLOAT)

    def times(self, factor: int, slope: int) -> int:
        """Return a product, or one factor where the other is 1."""
        one = self.number(1.0)
        if slope == one or factor == one:
            return factor if slope == one else slope
        return self("multiply", factor, slope)

    def total(self, *terms: int | None) -> int | None:
        """Return the sum of terms; None for 0."""
        found = [term for term in terms if term is not None]
        if not found:
            return None
        total = found[0]
        for term in found[1:]:
            total = self("add", total, term)
        return total

    def either(self, condition: int, a: int | None, b: int | None) -> int | None:
        """Return one of two slopes."""
        if a == b:
            return a
        chosen = (self.number(0.0) if slope is None else slope for slope in (a, b))
        return where(self._graph, self._graph.cast(condition, BOOL), *chosen)

    def unless_zero(self, x: int, slope: int) -> int:
        """Return a slope, or 0 where a number is 0."""
        return where(self._graph, self("equal", x, 0.0), self.number(0.0), slope)


_CHOICES: Mapping[str, Callable[[_Terms, int, int], int]] = {
    "maximum": lambda do, a, b: do("greater", a, b),
    "minimum": lambda do, a, b: do("less", a, b),
    "fmax": lambda do, a, b: do("logical_or", do("greater", a, b), do("isnan", b)),
    "fmin": lambda do, a, b: do("logical_or", do("less", a, b), do("isnan", b)),
}
"""Whether the first of two operands is the value."""

_FLAT = frozenset(("sign", "rint", "floor", "ceil", "trunc", "floor_divide"))
"""Functions that are constant but for steps."""

_SUMS: Mapping[str, tuple[int, ...]] = {"add": (1, 1), "subtract": (1, -1), "negative": (-1,)}
"""Signs of the operands."""

_Factor = Callable[[], int]
_Factors = tuple["_Factor | None", ...]


def _of_power(do: _Terms, i: int, a: int, b: int) -> _Factors:
    return (
        lambda: do("multiply", b, do("power", a, do("subtract", b, 1.0))),
        # The limit at 0, where log is not finite
        lambda: do.unless_zero(a, do("multiply", i, do("log", a))),
    )


def _of_quotient(do: _Terms, i: int, a: int, b: int) -> _Factors:
    return lambda: do("divide", 1.0, b), lambda: do("negative", do("divide", i, b))


def _of_hypot(do: _Terms, i: int, a: int, b: int) -> _Factors:
    return (
        lambda: do.unless_zero(i, do("divide", a, i)),
        lambda: do.unless_zero(i, do("divide", b, i)),
    )


def _of_angle(do: _Terms, i: int, a: int, b: int) -> _Factors:
    square = do("add", do("square", a), do("square", b))
    return (
        lambda: do.unless_zero(square, do("divide", b, square)),
        lambda: do.unless_zero(square, do("negative", do("divide", a, square))),
    )


def _of_remainder(do: _Terms, i: int, a: int, b: int) -> _Factors:
    return lambda: do.number(1.0), lambda: do("negative", do("floor_divide", a, b))


def _of_fmod(do: _Terms, i: int, a: int, b: int) -> _Factors:
    return lambda: do.number(1.0), lambda: do("negative", do("trunc", do("divide", a, b)))


def _of_copysign(do: _Terms, i: int, a: int, b: int) -> _Factors:
    return lambda: do("copysign", do("sign", a), do("multiply", do("sign", a), b)), None


def _rising(do: _Terms, x: int, sign: float = -1.0) -> int:
    """Return 1 - x^2, or 1 + x^2."""
    return do("add" if sign > 0 else "subtract", 1.0, do("square", x))


_FACTORS: Mapping[str, Callable[..., _Factors]] = {
    "multiply": lambda do, i, a, b: (lambda: b, lambda: a),
    "divide": _of_quotient,
    "power": _of_power,
    "remainder": _of_remainder,
    "fmod": _of_fmod,
    "hypot": _of_hypot,
    "arctan2": _of_angle,
    "copysign": _of_copysign,
    "absolute": lambda do, i, a: (lambda: do("sign", a),),
    "fabs": lambda do, i, a: (lambda: do("sign", a),),
    "square": lambda do, i, a: (lambda: do("multiply", 2.0, a),),
    "sqrt": lambda do, i, a: (lambda: do("divide", 0.5, i),),
    "exp": lambda do, i, a: (lambda: i,),
    "exp2": lambda do, i, a: (lambda: do("multiply", _LN_2, i),),
    "expm1": lambda do, i, a: (lambda: do("exp", a),),
    "log": lambda do, i, a: (lambda: do("divide", 1.0, a),),
    "log2": lambda do, i, a: (lambda: do("divide", 1 / _LN_2, a),),
    "log10": lambda do, i, a: (lambda: do("divide", 1 / _LN_10, a),),
    "log1p": lambda do, i, a: (lambda: do("divide", 1.0, do("add", 1.0, a)),),
    "sin": lambda do, i, a: (lambda: do("cos", a),),
    "cos": lambda do, i, a: (lambda: do("negative", do("sin", a)),),
    "tan": lambda do, i, a: (lambda: _rising(do, i, 1.0),),
    "arcsin": lambda do, i, a: (lambda: do("divide", 1.0, do("sqrt", _rising(do, a))),),
    "arccos": lambda do, i, a: (lambda: do("divide", -1.0, do("sqrt", _rising(do, a))),),
    "arctan": lambda do, i, a: (lambda: do("divide", 1.0, _rising(do, a, 1.0)),),
    "sinh": lambda do, i, a: (lambda: do("cosh", a),),
    "cosh": lambda do, i, a: (lambda: do("sinh", a),),
    "tanh": lambda do, i, a: (lambda: _rising(do, i),),
}
"""The factors of the operands' slopes, given the node and its operands."""
