"""An expression -> the struct of C++ that is a part of a score."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cufa.arrays import Ints
from cufa.features.expression.graph import BOOL, FLOAT, INT, LONG, PAIR, SCORE, SIDE, Graph, Node
from cufa.features.expression.tilt import Tilt
from cufa.features.expression.values import ELEMENTS, ReadArray
from cufa.features.user_functions import OWN

_INLINE = {**{name: name for name in PAIR}, SCORE: "s", SIDE: SIDE}

SCORE_MOD, MASK_MOD = "score_mod", "mask_mod"
"""The arguments whose parts are written here."""

_SAYS = {
    SCORE_MOD: "LINEAR = false, NATURAL = true, KEY_MAJOR = true",
    MASK_MOD: "PAIRWISE = true, KEY_MAJOR = true",
}
_METHODS = {
    SCORE_MOD: "float score(float s, const Pair& pair) const",
    MASK_MOD: "bool hides(const Pair& pair) const",
}


class Element(NamedTuple):
    """An element of an array by which a score is differentiated.

    Attributes
    ----------
    load, slope : int
        The node that reads it, and the node of the derivative.
    sums : int
        Number of the array among those by which the score is differentiated.
    by_query, by_key : bool
        Whether it depends on the query, and on the key, which element that is.
    """

    load: int
    slope: int
    sums: int
    by_query: bool
    by_key: bool


def of_graph(
    argument: str,
    graph: Graph,
    root: int,
    reads: Sequence[ReadArray],
    tilt: Tilt | None = None,
    slope: int | None = None,
    elements: Sequence[Element] = (),
) -> tuple[str, str]:
    """Return name and source of the struct of a traced function.

    Parameters
    ----------
    argument : str
        `SCORE_MOD` or `MASK_MOD`.
    graph : Graph
    root : int
        A score in natural units, or whether a query sees a key.
    reads : sequence of ReadArray
        The arrays that nodes name by their numbers.
    tilt : Tilt, optional
        The growth of a score that grows evenly from key to key.
    slope : int, optional
        The derivative of the score by what it was before; None for 1.
    elements : sequence of Element
        Elements by which the score is differentiated, too.
    """
    differentiated = 1 + max((element.sums for element in elements), default=-1)
    members = [f"float* {sums_of_read(i)};" for i in range(differentiated)]
    members += [
        f"numpy::Array<{ELEMENTS[array.dtype][0]}, {array.ndim}> {_named(number)};"
        for number, array, _ in reads
    ]
    if elements:
        members.append(f"static constexpr int SUMS = {len(elements)};")

    def add(head: str, *nodes: int, value: str = "{}") -> None:
        """Add a method that returns a node's value, or what is made of several."""
        members.append(f"__device__ {head} {{\n{_returning(graph, nodes, value)}    }}")

    says = _SAYS[argument]
    add(_METHODS[argument], root, value="!{}" if argument == MASK_MOD else "{}")
    if tilt is not None:
        says += ", AFFINE_IN_KEY = true"
        add("float step(const Pair& pair, int side) const", tilt.step)
        if tilt.turn is not None:
            says += ", BREAKS_ELSEWHERE = true"
            add("int turn(const Pair& pair) const", tilt.turn)
    if slope is not None:
        add("float slope(float s, float changed, const Pair& pair) const", slope)
    if elements:
        says += f", COLLIDES = true, {_listed('BY_QUERY', [e.by_query for e in elements])}"
        says += f", {_listed('BY_KEY', [e.by_key for e in elements])}"
    for i, element in enumerate(elements):
        load = graph.nodes[element.load]
        indices = "".join(f", {_index(graph, j, '{}')}" for j in load.operands)
        place = f"{sums_of_read(element.sums)} + numpy::number({_named(load.array)}{indices})"
        add(f"float partial(Read<{i}>, float s, const Pair& pair) const", element.slope)
        add(
            f"float* place(Read<{i}>, float s, const Pair& pair) const", *load.operands, value=place
        )
    return _struct(argument, says, members, "expression_sums" if elements else "expression")


def sums_of_read(i: int) -> str:
    """Return the name of the sums of an array by which a score is differentiated."""
    return f"{SCORE_MOD}_sums_{i}"


def _listed(name: str, values: Sequence[bool]) -> str:
    """Return the definition of an array of bools."""
    return f"{name}[] = {{{', '.join(str(x).lower() for x in values)}}}"


def _named(array: int) -> str:
    """Return the name of an array of this number."""
    return f"a{array}"


def _returning(graph: Graph, nodes: Ints, value: str) -> str:
    """Return the statements that return what is made of the values of nodes."""
    texts: dict[int, str] = {}
    lines: list[str] = []
    for i in graph.reachable(*nodes):
        node = graph.nodes[i]
        texts[i] = _expression(graph, node, texts)
        if node.operands:
            lines.append(f"const {node.kind} x{len(lines)} = {texts[i]};")
            texts[i] = f"x{len(lines) - 1}"
    lines.append(f"return {value.format(*(texts[node] for node in nodes))};")
    return "".join(f"        {line}\n" for line in lines)


def of_text(argument: str, text: str) -> tuple[str, str]:
    """Return name and source of the struct of an expression of C++, or of a body that returns it.

    Parameters
    ----------
    argument : str
        `SCORE_MOD` or `MASK_MOD`.
    text : str
    """
    names = "int b, int h, int q_idx, int kv_idx"
    body = text if "return" in text else f"return {text}\n;"
    pair = ", ".join(PAIR)
    if argument == SCORE_MOD:
        of, call = f"float of(float score, {names})", f"of(s, {pair})"
    else:
        of, call = f"bool of({names})", f"!of({pair})"
    members = [
        f"static __device__ {of} {{\n{body}\n}}",
        f"__device__ {_METHODS[argument]} {{\n        return {call};\n    }}",
    ]
    return _struct(argument, _SAYS[argument], members, "expression")


def _struct(argument: str, says: str, members: Sequence[str], header: str) -> tuple[str, str]:
    """Return name, which says what is in it, and source of a struct."""
    body = "\n    ".join((f"static constexpr bool {says};", *members))

    def written(name: str) -> str:
        head = f'\n#include "{header}.cuh"\n#line 1 "{argument}"\nstruct {name} : Part<{name}>'
        return f"{head} {{\n    {body}\n    }};\n"

    digest = hashlib.sha256(written("").encode()).hexdigest()[:12]
    name = f"{OWN[argument]}_{digest}"
    return name, written(name)


def _expression(graph: Graph, node: Node, texts: Mapping[int, str]) -> str:
    name, kind, operands, text, array, axis = node
    values = [texts[i] for i in operands]
    if name in _INLINE:
        return _INLINE[name]
    if name == "constant":
        return _LITERALS[kind](text)
    if name == "length":
        return f"{_named(array)}.lengths[{axis}]"
    if name == "cast":
        return f"static_cast<{kind}>({values[0]})"
    if name == "where":
        return "{} ? {} : {}".format(*values)
    if name == "load":
        indices = (_index(graph, i, text) for i, text in zip(operands, values, strict=True))
        return f"numpy::read<{kind}>({_named(array)}.at({', '.join(indices)}))"
    return f"numpy::{name}({', '.join(values)})"


def _index(graph: Graph, i: int, text: str) -> str:
    never_negative = graph.kind(i) == INT and graph.is_never_negative(i)
    return f"static_cast<uint32_t>({text})" if never_negative else text


def _float(text: str) -> str:
    number = float.fromhex(text)
    if number != number:
        return "NAN"
    return text.upper() if abs(number) == np.inf else f"{text}f"


_LITERALS: dict[str, Callable[[str], str]] = {
    BOOL: {"0": "false", "1": "true"}.__getitem__,
    INT: lambda text: "(-2147483647 - 1)" if text == str(-(2**31)) else text,
    LONG: lambda text: f"({-(2**63) + 1}LL - 1)" if text == str(-(2**63)) else f"{text}LL",
    FLOAT: _float,
}
