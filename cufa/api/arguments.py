"""The arguments of a call by name, as the public functions share them on the way to a `Problem`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cufa.api.block_mask import with_block_mask
from cufa.api.other_names import refuse
from cufa.arrays import Array, Ints, Operands, as_bhsd
from cufa.checks import refuse_kernel
from cufa.cpu import attention as cpu
from cufa.cpu.functions import Functions, checked
from cufa.features.dropout import check_dropout_seed
from cufa.features.expression.tracing import TracedFunctions
from cufa.problem.parse import parse, restore_shape
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


class Call(NamedTuple):
    """A call that has been checked, as far as dense and other arrays differ.

    Attributes
    ----------
    problem : Problem
    operands : Operands
        With the seed of a dropout.
    lengths : dict
        The arrays that say how long sequences are, by argument, in order.
    shapes : tuple
        The shapes of the result and of its log-sum-exp.
    view : callable
        Makes a (batch, heads, seq, head_dim) view of an array of the caller's.
    ndim : int
        Axes of q, as parts of the score count them.
    """

    problem: Problem
    operands: Operands
    lengths: dict[str, Array | None]
    shapes: tuple[Ints, Ints]
    view: Callable[[Array], Array]
    ndim: int


def call_of(arguments: Mapping[str, Any], mods: TracedFunctions, xp: ModuleType) -> Call:
    """Check the arguments that `attention` and its gradients have in common, as `parsed`."""
    problem, operands = parsed(arguments, mods, xp)
    ndim, layout = len(arguments["q"].shape), arguments["layout"]
    operands = operands._replace(seed=check_dropout_seed(arguments["seed"], arguments["dropout_p"]))
    lengths = ("lengths_k", "lengths_q") if problem.kv == "Padded" else ()
    return Call(
        *(problem, operands, {name: arguments[name] for name in lengths}),
        restore_shape(problem, ndim, layout),
        lambda x: as_bhsd(x, layout),
        ndim,
    )


def parsed(
    arguments: Mapping[str, Any], mods: TracedFunctions, xp: ModuleType
) -> tuple[Problem, Operands]:
    """Return the problem of a call with such arguments, and its arrays.

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


def on_cpu(call: Call, arguments: Mapping[str, Any]) -> Any:
    """Run a call of `attention`, or of `attention_varlen`, on NumPy arrays."""
    functions, out, operands = functions_on_cpu(arguments), arguments["out"], call.operands
    shape, lse_shape = call.shapes
    if out is None:
        out = np.empty(shape, arguments["q"].dtype)
        operands = operands._replace(out=call.view(out))
    else:
        functions.check_apart("out", out)
    result = operands.out
    if functions.is_called:  # whatever they raise, `out` is whole
        operands = operands._replace(out=result.copy())
    lse = cpu.attention(call.problem, operands, call.lengths, functions)
    if result is not operands.out:
        result[...] = operands.out
    return (out, lse.reshape(lse_shape)) if arguments["return_lse"] else out
