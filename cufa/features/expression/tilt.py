"""The growth of a term of the score that grows evenly from key to key.

Kernels then add it without a step of its own, see ``kernels/tilt.cuh``. It may do so in two pieces,
with a distance: the absolute value of what is linear in the positions of query and key.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from cufa.features.expression.graph import FLOAT, INT, LONG, PAIR, SCORE, SIDE, Graph, Node
from cufa.features.expression.rules import applied

_QUERY, _KEY = PAIR[-2:]
_LINEAR = {_QUERY, _KEY, "constant", "add", "subtract", "negative", "multiply"}
_POSITION = 1 << 24  # integers that are as positions are
_SMALL = 64  # factors of these that do not make them wrap around


class Tilt(NamedTuple):
    """Nodes of what is added to a score evenly.

    Attributes
    ----------
    step : int
        Its growth from a key to the next on the same piece, as a node that may read `SIDE`.
    turn : int, optional
        An integer whose sign, which is `SIDE`, says on which of two pieces a pair is: linear in
        query and key.
    """

    step: int
    turn: int | None


def tilt_of(graph: Graph, root: int) -> Tilt | None:
    """Return what is added to a score, or None if it does not grow evenly from key to key.

    Parameters
    ----------
    graph : Graph
    root : int
        A score in natural units, whose derivative by the score that it is made of is 1.
    """
    turns: set[int] = set()
    varies: list[bool] = []
    for node in graph.nodes[: root + 1]:
        varies.append(node.name in (_KEY, SCORE) or any(varies[i] for i in node.operands))

    def total(a: int | None, b: int | None, name: str) -> int | None:
        """Return the sum or the difference of two steps; None stands for no growth."""
        if b is None:
            return a
        if a is None:
            return b if name == "add" else applied(graph, "negative", [b])
        return applied(graph, name, [a, b])

    @functools.cache
    def even(i: int) -> int | None:
        """Return the step of a node less the score; None if it is the same for all keys."""
        node = graph.nodes[i]
        if node.name == SCORE or not varies[i]:
            return None
        if node.name in ("absolute", "fabs"):
            return of_distance(node.operands[0])
        if node.kind == INT and times(i) > _SMALL:
            raise _UnevenError  # it may wrap around
        if node.name == _KEY:
            return graph.constant(1, INT)
        if node.kind not in (INT, LONG, FLOAT):
            raise _UnevenError
        a, b = (*node.operands, *node.operands)[:2]
        first, second = even(a), even(b)
        if node.name in ("add", "subtract"):
            return total(first, second, node.name)
        if node.name == "negative" and first is not None:
            return applied(graph, "negative", [first])
        # An integer of a float is uneven: what is cut off differs.
        is_even = node.kind == FLOAT or (node.kind == LONG and graph.kind(a) != FLOAT)
        if node.name == "cast" and is_even and first is not None:
            return graph.cast(first, node.kind)
        # A divisor that is no number may be 0.
        if node.name == "multiply" or (node.name == "divide" and is_number(b)):
            if first is not None and second is None:
                return applied(graph, node.name, [first, b])
            if first is None and second is not None:
                return applied(graph, "multiply", [second, a])
        raise _UnevenError

    def of_distance(i: int) -> int:
        """Return the step of the absolute value of a node."""
        while graph.nodes[i].name == "cast" and graph.kind(i) in (LONG, FLOAT):
            (i,) = graph.nodes[i].operands
        if graph.kind(i) != INT or not graph.names(i) <= _LINEAR or times(i) > _SMALL:
            raise _UnevenError
        step = even(i)
        if step is None:
            raise _UnevenError
        turns.add(i)
        return applied(graph, "multiply", [step, graph.add(Node(SIDE, INT))])

    @functools.cache
    def times(i: int) -> int:
        """Return how many times as large as a position an integer may be."""
        name, _, operands, text, _, _ = graph.nodes[i]
        if name in PAIR or (name == "constant" and abs(int(text)) <= _POSITION):
            return 1
        if name in ("add", "subtract", "negative", "absolute"):
            return sum(map(times, operands))
        factors = [j for j in operands if graph.nodes[j].name == "constant"]
        if name == "multiply" and len(factors) == 1:
            (other,) = (j for j in operands if j not in factors)
            return abs(int(graph.nodes[factors[0]].text)) * times(other)
        raise _UnevenError

    def is_number(i: int) -> bool:
        name, *_, text, _, _ = graph.nodes[i]
        return name == "constant" and float.fromhex(text) not in (0.0, math.inf, -math.inf)

    try:
        step = even(root)
    except _UnevenError:
        return None
    if len(turns) > 1:
        return None
    step = graph.constant(0.0, FLOAT) if step is None else graph.cast(step, FLOAT)
    return Tilt(step, turns.pop() if turns else None)


class _UnevenError(Exception):
    """The term does not grow evenly."""
