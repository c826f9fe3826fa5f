"""Values that a function is called with while it is traced: they note what is done with them.

NumPy's functions and operators come to it by `__array_ufunc__` and `__array_function__`, CuPy's by
a method of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from cufa.arrays import Array
from cufa.checks import shown_dtype
from cufa.dtypes import DTYPES
from cufa.features.expression import rules
from cufa.features.expression.graph import BOOL, FLOAT, INT, KINDS, LONG, TYPES, Graph, Node

ELEMENTS = {
    np.dtype(np.bool_): ("unsigned char", BOOL),
    np.dtype(np.int8): ("signed char", INT),
    np.dtype(np.uint8): ("unsigned char", INT),
    np.dtype(np.int16): ("short", INT),
    np.dtype(np.uint16): ("unsigned short", INT),
    np.dtype(np.int32): ("int", INT),
    np.dtype(np.uint32): ("unsigned int", LONG),
    np.dtype(np.int64): ("long long", LONG),
    np.dtype(np.float64): ("double", FLOAT),
    **{np.dtype(name): (row.cpp, FLOAT) for name, row in DTYPES.items()},
}
"""The type of an element of an array in C++, and that which it has when it has been read."""

_ELSEWHERE = "an index of a list, or of an array that is no global name and no name around"
_NAME_IT = "make it an array and give it such a name"

_COMPUTED = {**{np.dtype(of): kind for kind, of in TYPES.items()}, np.dtype(np.float64): FLOAT}
"""Types that a value may be converted to; `ELEMENTS` are those that may be read."""


class ReadArray(NamedTuple):
    """An array to which a function refers.

    Attributes
    ----------
    number : int
        Among those of the function.
    array : array
    name : str
    """

    number: int
    array: Array
    name: str


def _unknown(request: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that refuses what asks for a value."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"{request} asks for a value, which there is only when the kernel runs: {instead}"
        )

    return refuse


class _Traced(NDArrayOperatorsMixin):
    """A value that is there when a kernel runs, and not while a function is traced."""

    __slots__ = ("_graph",)
    _graph: Graph

    def _node(self) -> int:
        """Return the number of the node that it is."""
        raise NotImplementedError

    def _applied(self, function: str, operands: tuple[Any, ...]) -> Value:
        graph = self._graph
        known = [graph.kind(node_of(x, graph)) for x in operands if isinstance(x, _Traced)]
        kind = max(known, key=KINDS.index)
        nodes = [node_of(x, graph, kind) for x in operands]
        return Value(graph, rules.applied(graph, function, nodes))

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *operands: Any, out: Any = None, **options: Any
    ) -> Any:
        """Note a function; with `out`, as in `+=`, what that is from now on."""
        if ufunc is np.divmod:
            return np.floor_divide(*operands), np.remainder(*operands)
        if method != "__call__" or options:
            how = ", ".join(options) or method
            raise TypeError(f"numpy.{ufunc.__name__} with {how} cannot be computed in a kernel")
        result = self._applied(ufunc.__name__, operands)
        return result if out is None else result.put_into(out)

    def __array_function__(
        self, function: Any, types: Any, operands: tuple[Any, ...], options: dict[str, Any]
    ) -> Value:
        """Note a function that is no ufunc."""
        if function is np.clip:
            return _clip(*operands, **options)
        if function is not np.where or options or len(operands) != 3:
            known = "numpy.clip and numpy.where, with three arguments"
            raise TypeError(f"numpy.{function.__name__} is none of {known}, and no ufunc")
        return self._applied("where", operands)

    def __cupy_override_elementwise_kernel__(
        self, function: Any, *operands: Any, **options: Any
    ) -> Value:
        """Note a function of CuPy."""
        if options:
            raise TypeError(f"{function.name} with {', '.join(options)}: no kernel has this")
        return self._applied(function.name.removeprefix("cupy_"), operands)

    def astype(self, dtype: Any, copy: bool = True) -> Value:
        """Note a conversion: integers have 32 bits, or 64 if asked for, and floats have 32."""
        kind = _COMPUTED.get(np.dtype(dtype))
        if kind is None:
            known = ", ".join(map(str, _COMPUTED))
            raise TypeError(f"dtype {np.dtype(dtype)} is none that kernels compute in: {known}")
        return Value(self._graph, self._graph.cast(self._node(), kind))

    __bool__ = _unknown(
        "a condition (if, while, and, or, not, in, a < b < c, min, max)",
        "use numpy.where, &, |, ~, numpy.minimum and numpy.maximum",
    )
    __int__ = _unknown("int()", "use astype(numpy.int32)")
    __float__ = _unknown("float(), or a function of math,", "use astype and NumPy's functions")
    __complex__ = _unknown("complex()", "kernels have none")
    __index__ = _unknown(f"{_ELSEWHERE}, or range(),", _NAME_IT)
    __iter__ = _unknown("an iteration", "only Python's own loops are unrolled")
    __str__ = _unknown("str(), a format or print()", "repr() shows a symbol")
    __len__ = _unknown("len()", "an array's shape says it")
    __array__ = _unknown(f"{_ELSEWHERE}, or an array of it,", _NAME_IT)


def _clip(x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    """Note `numpy.clip`, by the names that its bounds have or had."""
    low, high = (a if b is None else b for a, b in ((a_min, min), (a_max, max)))
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


class Value(_Traced):
    """A number for each pair of query and key.

    Parameters
    ----------
    graph : Graph
    node : int
    """

    __slots__ = ("node",)

    def __init__(self, graph: Graph, node: int) -> None:
        self._graph, self.node = graph, node

    @property
    def is_one(self) -> bool:
        """Whether it is the constant 1, a float."""
        return self.node == self._graph.constant(1.0)

    def _node(self) -> int:
        return self.node

    def put_into(self, out: tuple[Any, ...]) -> Value:
        """Make another value this one, as NumPy's operators do in place; return that."""
        (other,) = out
        if not isinstance(other, Value):
            raise TypeError("arrays that a function reads cannot be written")
        kind = other._graph.kind(other.node)
        if KINDS.index(self._graph.kind(self.node)) > KINDS.index(kind):
            raise TypeError(f"what is {kind} cannot hold what is {self._graph.kind(self.node)}")
        other.node = self._graph.cast(self.node, kind)
        return other


class Lookup(_Traced):
    """An array that is read when the kernel runs.

    Parameters
    ----------
    graph : Graph
    read : ReadArray
    """

    __slots__ = ("_read",)

    def __init__(self, graph: Graph, read: ReadArray) -> None:
        self._graph, self._read = graph, read

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        ndim: int = self._read.array.ndim
        return ndim

    @property
    def shape(self) -> tuple[Value, ...]:
        """Their lengths, which are those of the array when the kernel runs."""
        nodes = (
            Node("length", INT, array=self._read.number, axis=axis) for axis in range(self.ndim)
        )
        return tuple(Value(self._graph, self._graph.add(node)) for node in nodes)

    def __getitem__(self, key: Any) -> Value:
        """Note an element."""
        name, found = self._read.name, []
        for index in key if isinstance(key, tuple) else (key,):
            if isinstance(index, slice) or index is None or index is Ellipsis:
                raise TypeError(f"{name} is indexed by integers, not by {index!r}")
            node = node_of(index, self._graph)
            if self._graph.kind(node) not in (INT, LONG):
                raise TypeError(f"an index of {name} is an integer, not {self._graph.kind(node)}")
            found.append(node)
        return Value(self._graph, self._element(*found))

    def _node(self) -> int:
        return self._element()

    def _element(self, *indices: int) -> int:
        number, array, name = self._read
        if len(indices) != array.ndim:
            raise TypeError(
                f"{name} has {array.ndim} axes, and {len(indices)} indices: an element is "
                "read with one for each axis at once"
            )
        if array.dtype not in ELEMENTS:
            dtype = shown_dtype(array.dtype)
            raise TypeError(f"{name} has dtype {dtype}, which no kernel reads")
        _, kind = ELEMENTS[array.dtype]
        return self._graph.add(Node("load", kind, indices, array=number))


def node_of(x: Any, graph: Graph, kind: str = BOOL) -> int:
    """Return the node of what a function is applied to; Python's numbers have the `kind` of others.

    As in NumPy: an integer with floats is a float, and a float is one whatever it is with.
    """
    if isinstance(x, _Traced):
        if x._graph is not graph:
            raise TypeError("a value of an earlier trace, which the function has kept")
        return x._node()
    if isinstance(x, (np.generic, np.ndarray)) and x.ndim == 0:
        x = x.item()
    if not isinstance(x, (bool, int, float)):
        raise TypeError(f"{type(x).__name__} is no number that a kernel computes with")
    return graph.constant(x, FLOAT if kind == FLOAT else None)
