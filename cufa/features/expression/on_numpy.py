"""An expression -> its value on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cufa.features.expression.graph import FLOAT, PAIR, SCORE, TYPES, Graph


def on_numpy(graph: Graph, root: int, arrays: Sequence[np.ndarray]) -> Callable[..., np.ndarray]:
    """Return what computes a node from a score and the numbers of its pair, which are arrays.

    Parameters
    ----------
    graph : Graph
    root : int
    arrays : sequence of ndarray
        The arrays that nodes name by their numbers.
    """

    def evaluated(*inputs: np.ndarray) -> np.ndarray:
        given = dict(zip((SCORE, *PAIR), inputs, strict=True))
        values: dict[int, Any] = {}
        for i in graph.reachable(root):
            name, kind, operands, text, array, axis = graph.nodes[i]
            dtype, found = TYPES[kind], [values[j] for j in operands]
            if name in given:
                values[i] = given[name].astype(dtype, copy=False)
            elif name == "constant":
                values[i] = dtype(float.fromhex(text) if kind == FLOAT else int(text))
            elif name == "length":
                values[i] = dtype(arrays[array].shape[axis])
            elif name == "load":
                values[i] = arrays[array][tuple(found)].astype(dtype)
            elif name == "cast":
                values[i] = found[0].astype(dtype)
            else:
                values[i] = getattr(np, name)(*found)
        return np.asarray(values[root])

    return np.errstate(all="ignore")(evaluated)
