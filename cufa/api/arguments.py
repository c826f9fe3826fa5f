"""The arguments of a call by name, as the public functions share them on the way to a `Problem`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from cufa.api.block_mask import with_block_mask
from cufa.api.other_names import refuse
from cufa.arrays import Operands
from cufa.checks import refuse_kernel
from cufa.cpu.functions import Functions, checked
from cufa.features.expression.tracing import TracedFunctions
from cufa.problem.parse import parse
from cufa.problem.problem import Problem

_F = TypeVar("_F", bound=Callable[..., Any])


def arguments_of(function: Callable[..., Any]) -> Callable[[_F], _F]:
    """Return a decorator: what it decorates is given all arguments of another function, by name.

    Arguments that the caller leaves out have the other function's defaults.
    """
    signature = inspect.signature(function)

    def decorate(decorated: _F) -> _F:
        @functools.wraps(decorated)
        def called(*args: Any, **keywords: Any) -> Any:
            unknown = [name for name in keywords if name not in signature.parameters]
            if unknown:
                refuse(decorated, unknown)
            try:
                bound = signature.bind(*args, **keywords)
            except TypeError:
                try:
                    function(*args, **keywords)  # which says what is missing, or too much
                except TypeError as error:
                    message = str(error).replace(function.__name__, decorated.__name__, 1)
                    raise TypeError(message) from None
                raise
            bound.apply_defaults()
            return decorated(**bound.arguments)

        returned = inspect.signature(decorated).return_annotation
        vars(called)["__signature__"] = signature.replace(return_annotation=returned)
        typed: Any = called
        return typed

    return decorate


def parsed(
    arguments: Mapping[str, Any], mods: TracedFunctions, xp: ModuleType
) -> tuple[Problem, Operands]:
    """Check the arguments that `attention` and its gradients have in common.

    Parameters
    ----------
    arguments : mapping
        The arguments, by name.
    mods : TracedFunctions
        The caller's functions, traced.
    xp : module
        The module that the arrays belong to.
    """
    problem, operands = parse(arguments, xp, mods)
    if arguments["block_mask"] is not None:
        problem = with_block_mask(problem, arguments["block_mask"], xp)
    return problem, operands


def functions_on_cpu(arguments: Mapping[str, Any]) -> Functions:
    """Return the functions of a call that runs on the CPU; refuse what is for the GPU."""
    refuse_kernel(arguments["kernel"])
    block_mask = arguments.get("block_mask")
    score_mod, mask_mod = (checked(name, arguments[name]) for name in ("score_mod", "mask_mod"))
    tiles = None if block_mask is None else (block_mask.kinds, block_mask.block)
    return Functions(score_mod, mask_mod, tiles=tiles)
