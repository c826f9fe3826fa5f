"""An expression -> its value on NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cufa.features.expression.graph import BOOL, FLOAT, INT, LONG, Graph, Node

_DTYPES: Mapping[str, Any] = {
    BOOL: np.bool_,
    INT: np.int32,
    LONG: np.int64,
    FLOAT: np.float32,
}


def evaluated(
    graph: Graph,
    root: int,
    inputs: Mapping[str, np.ndarray],
    arrays: Sequence[np.ndarray],
) -> np.ndarray:
    """Return the value of a node.

    Parameters
    ----------
    graph : Graph
    root : int
    inputs : mapping
        Values of the nodes without operands, by name: of the score and of the pair.
    arrays : sequence of ndarray
        The arrays that nodes name by their numbers.
    """
    values: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        for i in graph.reachable(root):
            node = graph.nodes[i]
            found = [values[j] for j in node.operands]
            values[i] = _value(node, found, inputs, arrays)
    return np.asarray(values[root])


def _value(
    node: Node,
    operands: list[Any],
    inputs: Mapping[str, np.ndarray],
    arrays: Sequence[np.ndarray],
) -> Any:
    name, kind, _, text, array, axis = node
    dtype = _DTYPES[kind]
    if name in inputs:
        return inputs[name].astype(dtype, copy=False)
    if name == "constant":
        return dtype(float.fromhex(text) if kind == FLOAT else int(text))
    if name == "length":
        return dtype(arrays[array].shape[axis])
    if name == "load":
        return arrays[array][tuple(operands)].astype(dtype)
    if name == "cast":
        return operands[0].astype(dtype)
    return getattr(np, name)(*operands)
