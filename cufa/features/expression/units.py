"""An expression of a score in natural units -> the same in the kernels', log2 units."""

from __future__ import annotations

import math

from cufa.features.expression.graph import FLOAT, SCORE, SCORE_LOG2, Graph, Node
from cufa.features.expression.rules import applied, where

_LOG2_E = math.log2(math.e)


def in_log2(graph: Graph, root: int) -> int:
    """Return the node of a score in log2 units; itself where the expression is the score alone.

    Whatever is proportional to the score, or is added to such, needs no conversion of the score and
    back: what is added is converted.
    """
    of_score: dict[int, bool] = {}
    for i in range(root + 1):
        node = graph.nodes[i]
        of_score[i] = node.name == SCORE or any(of_score[j] for j in node.operands)

    def added(score: int, i: int, factor: float) -> int:
        """Return their sum, rounded once: a product that is rounded, too, costs float32 a bit."""
        node = graph.nodes[i]
        if node.name == "constant":
            return applied(graph, "add", [score, graph.constant(factor * _value(node))])
        operands = graph.cast(i, FLOAT), graph.constant(factor), score
        return graph.add(Node("multiply_add", FLOAT, operands))

    def converted(i: int) -> int:
        name, kind, operands, *_ = graph.nodes[i]
        if name == SCORE:
            return graph.add(Node(SCORE_LOG2, FLOAT))
        inner = [of_score[j] for j in operands]
        if kind == FLOAT and any(inner):
            if name == "add" and not all(inner):
                of_it, other = operands if inner[0] else operands[::-1]
                return added(converted(of_it), other, _LOG2_E)
            if name == "subtract" and inner == [True, False]:
                return added(converted(operands[0]), operands[1], -_LOG2_E)
            if name in ("add", "subtract", "minimum", "maximum", "negative", "absolute"):
                return applied(graph, name, [converted(j) for j in operands])
            if name == "where" and not inner[0]:
                condition, a, b = operands
                return where(graph, condition, converted(a), converted(b))
            if name in ("multiply", "divide") and inner == [True, False]:
                return applied(graph, name, [converted(operands[0]), operands[1]])
            if name == "multiply" and inner == [False, True]:
                return applied(graph, name, [operands[0], converted(operands[1])])
        node = graph.nodes[i]
        if node.name == "constant":
            return graph.constant(_LOG2_E * _value(node))
        factor = graph.constant(_LOG2_E)
        return applied(graph, "multiply", [graph.cast(i, FLOAT), factor])

    return converted(root)


def _value(node: Node) -> float:
    return float.fromhex(node.text) if node.kind == FLOAT else float(node.text)
