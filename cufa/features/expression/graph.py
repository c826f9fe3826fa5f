"""An expression as a graph of typed nodes, each a function of others; equal ones are one.

A node's value on NumPy arrays is here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

BOOL, INT, LONG, FLOAT = KINDS = ("bool", "int", "long long", "float")
"""The types of C++ that a node may have; arithmetic of two types is in the later one."""

TYPES: dict[str, Any] = dict(zip(KINDS, (np.bool_, np.int32, np.int64, np.float32), strict=True))
"""The same types of NumPy."""

PAIR = ("pair.batch", "pair.head", "pair.query", "pair.key")
"""Nodes of the pair whose score it is: integers that are not negative."""

SIDE = "side"
"""A node of the piece on which a pair is, see `cufa.features.expression.tilt`: 1, or -1."""

SCORE = "score"
"""The node of the score, in natural units."""

_INT32, _INT64 = np.iinfo(np.int32), np.iinfo(np.int64)


class Node(NamedTuple):
    """A value that is computed.

    Attributes
    ----------
    name : str
        One of `PAIR`, `SCORE`, "constant", "cast", "where", "load", "length", or a
        function of ``kernels/expression.cuh``.
    kind : str
        One of `KINDS`.
    operands : tuple of int
        Numbers of nodes.
    text : str
        A constant, as Python reads it: integers in digits, floats in hexadecimal ones.
    array, axis : int
        Number of the array that is read, and the axis whose length it is.
    """

    name: str
    kind: str
    operands: tuple[int, ...] = ()
    text: str = ""
    array: int = -1
    axis: int = 0


class Graph:
    """The nodes of an expression.

    Attributes
    ----------
    nodes : list of Node
        Each after its operands.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[Node, int] = {}

    def add(self, node: Node) -> int:
        """Return the number of a node, new or known."""
        number = self._known.setdefault(node, len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(node)
        return number

    def kind(self, i: int) -> str:
        """Return the type of a node."""
        return self.nodes[i].kind

    def constant(self, value: bool | int | float, kind: str | None = None) -> int:
        """Return the number of a constant, of a type of its own unless one is given."""
        if kind is None:
            kind = _kind_of(value)
        return self.add(Node("constant", kind, text=_text_of(value, kind)))

    def cast(self, i: int, kind: str) -> int:
        """Return a node's value as another type."""
        return i if self.kind(i) == kind else self.add(Node("cast", kind, (i,)))

    def is_never_negative(self, i: int) -> bool:
        """Whether it is known that a node, an integer, is not negative unless it overflows."""
        name, _, operands, text, _, _ = self.nodes[i]
        if name in PAIR or name == "length":
            return True
        if name == "constant":
            return not text.startswith("-")
        if name in ("add", "multiply", "floor_divide", "remainder"):
            return all(map(self.is_never_negative, operands))
        return False

    def reachable(self, *roots: int) -> list[int]:
        """Return nodes and all that they are computed from, each after its operands."""
        found = set(roots)
        for i in range(max(roots, default=-1), -1, -1):
            if i in found:
                found.update(self.nodes[i].operands)
        return sorted(found)

    def names(self, *roots: int) -> set[str]:
        """Return the names of nodes and of all that they are computed from."""
        return {self.nodes[i].name for i in self.reachable(*roots)}

    def on_numpy(self, root: int, arrays: Sequence[np.ndarray]) -> Callable[..., np.ndarray]:
        """Return what computes a node from a score and the numbers of its pair, which are arrays.

        Parameters
        ----------
        root : int
        arrays : sequence of ndarray
            The arrays that nodes name by their numbers.
        """

        def evaluated(*inputs: np.ndarray) -> np.ndarray:
            given = dict(zip((SCORE, *PAIR), inputs, strict=True))
            values: dict[int, Any] = {}
            for i in self.reachable(root):
                name, kind, operands, text, array, axis = self.nodes[i]
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


def _kind_of(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, float):
        return FLOAT
    if _INT32.min <= value <= _INT32.max:
        return INT
    if _INT64.min <= value <= _INT64.max:
        return LONG
    raise TypeError(f"{value} is no integer of 64 bits")


def _text_of(value: bool | int | float, kind: str) -> str:
    if kind != FLOAT:
        return str(int(value))
    with np.errstate(over="ignore"):
        return float(np.float32(value)).hex()
