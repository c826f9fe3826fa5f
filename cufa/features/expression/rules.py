"""Results of NumPy's functions in an expression: the function of C++, and the type."""

from __future__ import annotations

from cufa.features.expression.graph import BOOL, FLOAT, INT, KINDS, Graph, Node

_TYPES: dict[str, tuple[str | None, str]] = {
    name: types
    for names, types in (
        ("divide sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan", (FLOAT, FLOAT)),
        ("arcsin arccos arctan arctan2 sinh cosh tanh fabs rint copysign hypot", (FLOAT, FLOAT)),
        ("isnan isinf isfinite", (FLOAT, BOOL)),
        ("less less_equal greater greater_equal equal not_equal", (None, BOOL)),
        ("logical_and logical_or logical_xor logical_not", (BOOL, BOOL)),
    )
    for name in names.split()
}
"""The types that a function takes, None for the common one of its operands, and returns."""

_BITS = frozenset(("bitwise_and", "bitwise_or", "bitwise_xor", "invert"))
_SHIFTS = frozenset(("left_shift", "right_shift"))
_ROUNDINGS = frozenset(("floor", "ceil", "trunc"))
_NO_BOOLS = frozenset(("subtract", "negative", "positive", "sign"))
_OF_BOOLS = {
    **dict.fromkeys(("add", "maximum", "fmax"), "logical_or"),
    **dict.fromkeys(("multiply", "minimum", "fmin"), "logical_and"),
}
_NUMERIC = frozenset(
    (*_OF_BOOLS, *_NO_BOOLS, "floor_divide", "remainder", "fmod", "absolute", "square")
)

_OTHER_NAMES = {"true_divide": "divide", "mod": "remainder", "abs": "absolute"}  # CuPy has them

_MOST_FACTORS = 64  # of a power with a constant exponent


def applied(graph: Graph, function: str, operands: list[int]) -> int:
    """Return the node of one of NumPy's functions; TypeError for an unknown one.

    Parameters
    ----------
    graph : Graph
    function : str
        As NumPy names it, such as "add".
    operands : list of int
        Nodes.
    """
    name = _OTHER_NAMES.get(function, function)
    if name == "where":
        return where(graph, *operands)
    if name == "clip":
        x, low, high = operands
        return applied(graph, "minimum", [applied(graph, "maximum", [x, low]), high])
    kind = common(graph, operands)
    if name == "power":
        return _power(graph, *operands)
    if name in _TYPES:
        takes, gives = _TYPES[name]
        return _call(graph, name, operands, takes or kind, gives)
    if name in _ROUNDINGS:
        return _call(graph, name, operands, FLOAT, FLOAT) if kind == FLOAT else operands[0]
    if name in _BITS or name in _SHIFTS:
        if kind == FLOAT:
            raise TypeError(f"numpy.{function} is for integers and bools")
        if kind == BOOL and name == "invert":
            name = "logical_not"
        if kind == BOOL and name in _SHIFTS:
            kind = INT
        return _call(graph, name, operands, kind, kind)
    if name not in _NUMERIC:
        raise TypeError(f"{function} is no function that kernels have")
    if kind == BOOL:
        if name in _NO_BOOLS:
            raise TypeError(f"numpy.{function} is not for bools, as in NumPy")
        name, kind = (_OF_BOOLS[name], BOOL) if name in _OF_BOOLS else (name, INT)
    if name == "positive":
        return operands[0]
    return _call(graph, name, operands, kind, kind)


def common(graph: Graph, operands: list[int]) -> str:
    """Return the type in which arithmetic of these nodes is."""
    return max((graph.kind(i) for i in operands), key=KINDS.index)


def where(graph: Graph, condition: int, a: int, b: int) -> int:
    """Return the node of one of two values."""
    kind = common(graph, [a, b])
    operands = graph.cast(condition, BOOL), graph.cast(a, kind), graph.cast(b, kind)
    return graph.add(Node("where", kind, operands))


def _call(graph: Graph, name: str, operands: list[int], takes: str, gives: str) -> int:
    return graph.add(Node(name, gives, tuple(graph.cast(i, takes) for i in operands)))


def _power(graph: Graph, base: int, exponent: int) -> int:
    """Return a power; for a small constant integer as exponent, a product."""
    kind = common(graph, [base, exponent])
    node = graph.nodes[exponent]
    if node.name == "constant":
        n = float.fromhex(node.text) if node.kind == FLOAT else int(node.text)
        if abs(n) <= _MOST_FACTORS and n == int(n) and (n >= 0 or kind == FLOAT):
            return _product(graph, graph.cast(base, INT if kind == BOOL else kind), int(n))
    if kind != FLOAT:
        raise TypeError("an integer to the power of an integer needs a constant exponent, 0 to 64")
    return _call(graph, "power", [base, exponent], FLOAT, FLOAT)


def _product(graph: Graph, base: int, n: int) -> int:
    """Return a power by squares."""
    if n <= 0:
        one = graph.constant(1, graph.kind(base))
        return one if n == 0 else applied(graph, "divide", [one, _product(graph, base, -n)])
    if n == 1:
        return base
    root = _product(graph, base, n // 2)
    square = applied(graph, "multiply", [root, root])
    return applied(graph, "multiply", [square, base]) if n % 2 else square
