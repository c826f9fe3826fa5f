"""The arguments of a call by name, as the public functions share them on the way to a `Problem`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from cufa.api.block_mask import with_block_mask
from cufa.arrays import Array, Operands
from cufa.features import FEATURES
from cufa.features.expression.own import Own
from cufa.features.feature import Value
from cufa.features.parts import ARRAYS
from cufa.problem.parse import parse
from cufa.problem.problem import Problem

_F = TypeVar("_F", bound=Callable[..., Any])

_VALUES = tuple(kind.ARGUMENT for kind in FEATURES if issubclass(kind, Value))


def arguments_of(function: Callable[..., Any]) -> Callable[[_F], _F]:
    """Return a decorator: what it decorates is given all arguments of another function, by name.

    Those that the caller leaves out have the other function's defaults.
    """
    signature = inspect.signature(function)

    def decorate(decorated: _F) -> _F:
        @functools.wraps(decorated)
        def called(*args: Any, **keywords: Any) -> Any:
            try:
                bound = signature.bind(*args, **keywords)
            except TypeError as error:
                raise TypeError(f"{decorated.__name__}() {error}") from None
            bound.apply_defaults()
            return decorated(**bound.arguments)

        returned = inspect.signature(decorated).return_annotation
        vars(called)["__signature__"] = signature.replace(return_annotation=returned)
        typed: Any = called
        return typed

    return decorate


def values_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that say what becomes of the scores and are plain values."""
    return {name: arguments[name] for name in _VALUES if name in arguments}


def arrays_of(arguments: Mapping[str, Any]) -> dict[str, Array | None]:
    """Return the arguments that are arrays which parts of the score read."""
    return {name: arguments[name] for name in ARRAYS if name in arguments and name != "block_mask"}


def parsed(
    arguments: Mapping[str, Any], mods: Own, xp: ModuleType, out: Array | None, return_lse: bool
) -> tuple[Problem, Operands]:
    """Check the arguments that `attention` and its gradients have in common.

    Parameters
    ----------
    arguments : mapping
        The arguments, by name.
    mods : Own
        The caller's functions, traced.
    xp : module
        That the arrays belong to.
    out, return_lse
        As in `cufa.problem.parse.parse`, which raises the errors.
    """
    shared = {name: arguments[name] for name in ("scale", "layout", "lengths_k", "lengths_q")}
    problem, operands = parse(
        *(arguments[name] for name in "qkv"),
        asked=values_of(arguments),
        beside=arrays_of(arguments),
        own=mods,
        xp=xp,
        out=out,
        return_lse=return_lse,
        **shared,
    )
    if arguments["block_mask"] is not None:
        problem = with_block_mask(problem, arguments["block_mask"], xp)
    return problem, operands
