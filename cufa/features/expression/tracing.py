"""`score_mod` and `mask_mod` of a call -> parts of a score, and the arrays that these read."""

from __future__ import annotations

import functools
import linecache
import operator
import re
import traceback
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Array, Ints, check_unmasked
from cufa.features.expression import cpp
from cufa.features.expression.closures import Closure, closure, rebuilt
from cufa.features.expression.cpp import MASK_MOD, SCORE_MOD, Element, sums_of_read
from cufa.features.expression.derivative import derivative
from cufa.features.expression.graph import BOOL, FLOAT, INT, PAIR, SCORE, Graph, Node
from cufa.features.expression.tilt import tilt_of
from cufa.features.expression.values import ELEMENTS, Lookup, ReadArray, Value, node_of
from cufa.features.part import Parameter, Part
from cufa.features.parts import register
from cufa.remembered import remember

_KNOWN = 256  # traces that are remembered
_AGAIN = 3  # traces: one that is the same by chance must not pass for all
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_MOST_BYTES = 1024  # of a kernel's parameter, for the arrays of a function


class TracedFunctions(NamedTuple):
    """The caller's own steps between Q K^T and the softmax.

    Attributes
    ----------
    parts : tuple of str
        Parts of the score; a function that changes nothing has none.
    arrays : tuple of array
        Arrays that the parts read, in order.
    names : tuple of str
        Names of these arrays in messages.
    sums : tuple of str
        Names of those whose gradients the `score_mod` adds up, in the order of its parameters.
    """

    parts: tuple[str, ...] = ()
    arrays: tuple[Array, ...] = ()
    names: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()

    @property
    def read(self) -> dict[str, Array]:
        """The arrays by name."""
        return dict(zip(self.names, self.arrays, strict=True))


NOTHING = TracedFunctions()

_SCORE = Node(SCORE, FLOAT)
_UNCHANGED, _ALL_SEEN = _SCORE, Node("constant", BOOL, text="1")


_Traced = tuple[TracedFunctions, Ints]
"""A function, but for the arrays that it reads, and which of those to which it refers they are."""

_known: dict[tuple[Any, ...], _Traced] = {}


def trace(score_mod: object, mask_mod: object, wrt: tuple[str, ...] = ()) -> TracedFunctions:
    """Return the parts of a call's own expressions.

    Functions are traced once: again only if what they refer to has other types, numbers of axes, or
    values that are in no array.

    Parameters
    ----------
    score_mod, mask_mod : callable, str or None
        As in `cufa.attention`.
    wrt : tuple of str
        Names of arrays of floats by which the `score_mod` is differentiated.

    Raises
    ------
    TypeError
        For what cannot be traced; it says where, and names the argument.
    ValueError
        More arrays than a kernel takes.
    """
    score = NOTHING if score_mod is None else _trace(SCORE_MOD, score_mod, wrt)
    if mask_mod is None:
        return score
    return TracedFunctions(*map(operator.add, score, _trace(MASK_MOD, mask_mod)))


def _trace(argument: str, given: Any, wrt: tuple[str, ...] = ()) -> TracedFunctions:
    """Return one function; as `trace`."""
    if isinstance(given, str):
        function, found = given, Closure((given,), {}, is_known=True)
    else:
        function = check(argument, given)
        found = closure(function)
    key = argument, found.key, wrt
    known = _known.get(key) if found.is_known else None
    if known is None:
        known = _traced(argument, function, found, wrt)
        if found.is_known:
            remember(_known, key, known, _KNOWN)
    traced, reads = known
    if not reads:
        return traced
    parts, _, names, sums = traced
    arrays = tuple(found.arrays.values())
    return TracedFunctions(parts, tuple(arrays[i][0] for i in reads), names, sums)


def check(argument: str, given: object) -> Any:
    """Return a function, a `functools.partial` or a method, of objects `__call__`; or TypeError."""
    if type(given) is functools.partial:
        return functools.partial(check(argument, given.func), *given.args, **given.keywords)
    if isinstance(given, (FunctionType, MethodType)):
        return given
    called = getattr(type(given), "__call__", None)  # noqa: B004
    if isinstance(given, type) or not isinstance(called, FunctionType):
        way_out = ""
        if hasattr(given, "__wrapped__"):  # of functools.lru_cache, say
            way_out = ": give the function that it wraps, its __wrapped__"
        elif callable(given) and not isinstance(given, type):
            way_out = ": call it in a lambda"
        raise TypeError(
            f"{argument} must be a function (def, lambda, functools.partial or an object that can "
            f"be called) or a string of C++, not {type(given).__name__}{way_out}"
        )
    return MethodType(called, given)


def derivative_of(score_mod: Callable[..., Any]) -> Callable[..., np.ndarray] | None:
    """Return the derivative of a `score_mod` by the score, for NumPy arrays; None if it is 1.

    It takes the arguments of `score_mod`.
    """
    recorded = _recorded(SCORE_MOD, score_mod, closure(score_mod))
    slope = _slope(recorded.graph, recorded.root)
    return None if slope is None else recorded.on_numpy(slope)


class Partial(NamedTuple):
    """The derivative of a `score_mod` by an element of an array that it reads, for NumPy arrays.

    Attributes
    ----------
    of : callable
        Called as the function is: the derivative.
    at : list of callable
        Each index of the element, called in the same way.
    """

    of: Callable[..., np.ndarray]
    at: list[Callable[..., np.ndarray]]


def read_by(score_mod: Callable[..., Any]) -> dict[str, Array]:
    """Return the arrays of floats to which a `score_mod` refers, by name."""
    arrays = closure(score_mod).arrays.values()
    floats = {dtype for dtype, (_, kind) in ELEMENTS.items() if kind == FLOAT}
    return {name: array for array, name in arrays if array.dtype in floats}


def partials_of(score_mod: Callable[..., Any], name: str) -> list[Partial]:
    """Return the derivatives of a `score_mod` by what it reads of an array, a place each."""
    recorded = _recorded(SCORE_MOD, score_mod, closure(score_mod))
    graph, root, reads = recorded
    numbers = {each.number: 0 for each in reads if each.name == name}
    return [
        Partial(
            recorded.on_numpy(each.slope),
            [recorded.on_numpy(index) for index in graph.nodes[each.load].operands],
        )
        for each in _elements(graph, root, numbers)
    ]


def indices_read(mask_mod: Callable[..., Any] | str) -> set[str]:
    """Return on which of b, h, q_idx and kv_idx a `mask_mod` depends, or which its C++ names."""
    indices = "b", "h", "q_idx", "kv_idx"
    if isinstance(mask_mod, str):
        code = _COMMENT.sub(" ", mask_mod)
        return set(re.findall(r"\w+", code)).intersection(indices)
    function = check(MASK_MOD, mask_mod)
    recorded = _recorded(MASK_MOD, function, closure(function))
    reached = recorded.graph.names(recorded.root)
    return {name for node, name in zip(PAIR, indices, strict=True) if node in reached}


def _slope(graph: Graph, root: int) -> int | None:
    """Return the node of the derivative of a node by the score; None if it is 1."""
    slope = derivative(graph, root, graph.add(_SCORE))
    return None if slope == graph.constant(1.0) else slope


class _Recorded(NamedTuple):
    """The record of a function: a node of a graph, and the arrays that nodes may read."""

    graph: Graph
    root: int
    reads: list[ReadArray]

    def on_numpy(self, node: int) -> Callable[..., np.ndarray]:
        """Return what computes a node from what the function is called with: NumPy arrays."""
        return self.graph.on_numpy(node, [read.array for read in self.reads])


def _recorded(argument: str, function: Callable[..., Any], found: Closure) -> _Recorded:
    graph = Graph()
    for array, name in found.arrays.values():
        check_unmasked(f"{argument}: {name}", array)
    reads = [
        ReadArray(i, *array_and_name) for i, array_and_name in enumerate(found.arrays.values())
    ]
    known = dict(zip(found.arrays, reads, strict=True))
    inputs = [Value(graph, graph.add(Node(name, INT))) for name in PAIR]
    if argument == SCORE_MOD:
        inputs.insert(0, Value(graph, graph.add(_SCORE)))
    try:
        traced = rebuilt(function, lambda array: Lookup(graph, known[id(array)]))
        root = node_of(traced(*inputs), graph)
        if argument == MASK_MOD and graph.kind(root) != BOOL:
            raise TypeError(f"it returns what is {graph.kind(root)}: a bool is needed")
        if argument == SCORE_MOD and graph.kind(root) == BOOL:
            raise TypeError(
                "it returns what is bool: a score is needed; a function that says which keys are "
                "seen is a mask_mod"
            )
    except Exception as error:
        where = _place(error.__traceback__)
        raise TypeError(f"{argument} cannot be traced: {error}{where}") from error
    return _Recorded(graph, root, reads)


def _traced(argument: str, function: Any, found: Closure, wrt: tuple[str, ...]) -> _Traced:
    if isinstance(function, str):
        name, source = cpp.of_text(argument, function)
        register(Part(name, argument, source=source))
        return TracedFunctions((name,)), ()
    graph, root, known = _recorded(argument, function, found)
    again = (_recorded(argument, function, found) for _ in range(_AGAIN))
    if any((each.graph.nodes, each.root) != (graph.nodes, root) for each in again):
        raise TypeError(
            f"{argument} is another function each time that it is traced: a random number or a "
            "counter in it would be one constant for all pairs; draw an array before the call, and "
            "read its elements, or use dropout_p"
        )
    slope = _slope(graph, root) if argument == SCORE_MOD else None
    if graph.nodes[root] in (_UNCHANGED, _ALL_SEEN):
        return NOTHING, ()
    reached = (graph.nodes[i] for i in graph.reachable(root))
    used = [known[i] for i in sorted({node.array for node in reached if node.array >= 0})]
    size = sum(8 + 12 * read.array.ndim for read in used)
    if size > _MOST_BYTES:
        raise ValueError(
            f"{argument} reads {len(used)} arrays, whose addresses, strides and lengths take "
            f"{size} bytes: a kernel has room for {_MOST_BYTES}"
        )
    tilt = tilt_of(graph, root) if argument == SCORE_MOD and slope is None else None
    sums = tuple(read.name for read in used if read.name in wrt)
    numbers = {read.number: sums.index(read.name) for read in used if read.name in sums}
    elements = _elements(graph, root, numbers)
    name, source = cpp.of_graph(argument, graph, root, used, tilt, slope, elements)
    ndims = tuple(read.array.ndim for read in used)
    parameters = tuple(Parameter(sums_of_read(i), "u8") for i in range(len(sums)))
    register(Part(name, argument, parameters, source=source, arrays=ndims, tilts=tilt is not None))
    names = tuple(f"{argument}: {read.name}" for read in used)
    return TracedFunctions((name,), (), names, sums), tuple(read.number for read in used)


def _elements(graph: Graph, root: int, sums: Mapping[int, int]) -> list[Element]:
    """Return the elements that a score is differentiated by; `sums` numbers the sums of arrays."""
    found = []
    for i in graph.reachable(root):
        node = graph.nodes[i]
        if node.name == "load" and node.array in sums:
            names = graph.names(*node.operands)
            by_query, by_key = (not names.isdisjoint((SCORE, name)) for name in PAIR[2:])
            slope = derivative(graph, root, i)
            found.append(Element(i, slope, sums[node.array], by_query, by_key))
    return found


def _place(where: TracebackType | None) -> str:
    """Return the line of the caller's own code where an error came up."""
    place = ""
    for frame, line in traceback.walk_tb(where):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("cufa", "numpy", "cupy"):
            path = frame.f_code.co_filename
            text = linecache.getline(path, line).strip()
            place = f" ({path}, line {line}{': ' if text else ''}{text})"
    return place
