"""The names that a function refers to: arrays, numbers, other functions.

Found again in each call, as a name may refer to something else by then; so it has to be quick.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import Array

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_FIXED = (BuiltinFunctionType, np.ufunc, type(np.where))
_MODULES = frozenset(("builtins", "numpy", "cupy", "math", "operator", "ml_dtypes"))
"""Modules: nobody changes their attributes, nor those of their types."""


class Closure(NamedTuple):
    """The objects that a function refers to.

    Attributes
    ----------
    key : tuple
        Equal for functions whose traces are the same: all but the contents and lengths of arrays.
    arrays : dict
        The arrays by `id`, each with the name that refers to it.
    is_known : bool
        Whether `key` says all; False with objects whose attributes may change.
    """

    key: tuple[Any, ...]
    arrays: dict[int, tuple[Array, str]]
    is_known: bool


def closure(function: Callable[..., Any]) -> Closure:
    """Return what a function, a `functools.partial` or a method refers to.

    A method refers to its object's attributes.
    """
    key: list[Any] = []
    arrays: dict[int, tuple[Array, str]] = {}
    named: dict[str, int] = {}  # how many arrays have a name
    places: dict[int, int] = {}  # of arrays and of what refers to others, by `id`
    is_known = True
    found: list[tuple[Any, str]] = [(function, "")]
    for value, name in found:  # while it grows
        kind: Any = type(value)
        key.append(kind)
        category = _category(kind)
        if category == "plain":
            key.append(value or repr(value))  # zeros of either sign are equal
        elif category == "fixed":
            key.append(value)
            owner = getattr(value, "__self__", None)  # of a method, which may read what changes
            is_known &= owner is None or isinstance(owner, ModuleType)
        elif category in ("module", "type"):
            key.append(value)
            module = value.__name__ if category == "module" else value.__module__
            is_known &= module in _MODULES
        elif category == "scalar":
            key.append(value.tobytes())
        elif category == "other":
            is_known = False
        elif id(value) in places:
            key.append(places[id(value)])
        else:
            places[id(value)] = len(places)
            if category == "array":
                key += value.dtype, value.ndim
                named[name] = same = named.get(name, 0) + 1
                arrays[id(value)] = value, f"{name} ({same})" if same > 1 else name
            elif category == "function":
                code = value.__code__
                key.append(code)
                for cell_name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
                    found.append((_content(cell), cell_name))
                known = value.__globals__
                for global_name in _names(code):
                    if global_name in known:
                        key.append(global_name)
                        found.append((known[global_name], global_name))
                if value.__defaults__ or value.__kwdefaults__:
                    found += (value.__defaults__, "a default"), (value.__kwdefaults__, "a default")
                if value.__dict__:
                    found.append((value.__dict__, "an attribute"))
            elif category == "partial":
                found += (value.func, name), (value.args, "an argument")
                found.append((value.keywords, "an argument"))
            elif category == "method":
                is_known = False  # a property, or a method, may read what changes
                found += (value.__func__, name), (_attributes(value), type(value.__self__).__name__)
            elif category == "dict":
                key.append(tuple(value))
                found += ((each, f"{name}[{k!r}]") for k, each in value.items())
            else:
                key.append(len(value))
                found += ((each, f"{name}[{i}]") for i, each in enumerate(value))
    return Closure(tuple(key), arrays, is_known)


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a function may refer to, and its attributes'."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(_names(constant))
    return tuple(names)


@functools.lru_cache(maxsize=1024)
def _category(kind: Any) -> str:
    if kind in _PLAIN:
        return "plain"
    if issubclass(kind, (np.ndarray, getattr(sys.modules.get("cupy"), "ndarray", np.ndarray))):
        return "array"
    if issubclass(kind, np.generic):
        return "scalar"
    if kind is FunctionType:
        return "function"
    if kind in (functools.partial, MethodType):
        return "method" if kind is MethodType else "partial"
    if kind in (tuple, list, dict):
        return "dict" if kind is dict else "sequence"
    if issubclass(kind, (ModuleType, type)):
        return "type" if issubclass(kind, type) else "module"
    return "fixed" if issubclass(kind, _FIXED) else "other"


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # that has none yet
        return None


def _attributes(method: MethodType) -> dict[str, Any]:
    """Return the attributes of a method's object; none for a class and an object with slots."""
    owner = method.__self__
    return {} if isinstance(owner, type) else getattr(owner, "__dict__", {})


def rebuilt(function: Callable[..., Any], stand_in: Callable[[Array], Any]) -> Callable[..., Any]:
    """Return a function that refers to other objects in place of arrays, wherever it does.

    Parameters
    ----------
    function : function, partial or method
    stand_in : callable
        Array -> what takes its place.
    """
    known: dict[int, Any] = {}

    def of(value: Any) -> Any:
        kind: Any = type(value)
        category = _category(kind)
        if category not in ("array", "function", "partial", "method", "sequence", "dict"):
            return value
        if id(value) not in known:
            if category == "array":
                known[id(value)] = stand_in(value)
            elif category == "function":
                cells = tuple(CellType() for _ in value.__closure__ or ())
                names = value.__globals__.copy()
                known[id(value)] = made = FunctionType(
                    value.__code__, names, value.__name__, None, cells
                )
                for cell, original in zip(cells, value.__closure__ or (), strict=True):
                    cell.cell_contents = of(_content(original))
                for name in _names(value.__code__):
                    if name in names:
                        names[name] = of(names[name])
                made.__defaults__ = of(value.__defaults__)
                made.__kwdefaults__ = of(value.__kwdefaults__)
                made.__dict__.update(of(value.__dict__))
            elif category == "partial":
                arguments, named = of(value.args), of(value.keywords)
                known[id(value)] = functools.partial(of(value.func), *arguments, **named)
            elif category == "method":
                owner, attributes = value.__self__, _attributes(value)
                if attributes:
                    owner = object.__new__(type(owner))
                    owner.__dict__.update(of(attributes))
                known[id(value)] = MethodType(of(value.__func__), owner)
            elif kind is tuple:
                known[id(value)] = tuple(map(of, value))
            elif kind is list:
                known[id(value)] = []
                known[id(value)].extend(map(of, value))
            else:
                known[id(value)] = {}
                known[id(value)].update((key, of(each)) for key, each in value.items())
        return known[id(value)]

    return of(function)
