"""Gradients of CuPy arrays, for `attention_backward` and `attention_varlen_backward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cufa.api.arguments import Call
from cufa.arrays import Array
from cufa.features.expression.tracing import TracedFunctions, trace
from cufa.launch import backward, calls
from cufa.problem.extras import Extras
from cufa.problem.parse_backward import TENSORS, WRT, Gradients, Results


def traced(
    wrt: tuple[str, ...],
    score_mod: Callable[..., Any] | str | None,
    mask_mod: Callable[..., Any] | str | None,
    kernel: object,
) -> TracedFunctions:
    """Return the functions of a call, as the kernels take them; refuse what these do not compute.

    Raises
    ------
    TypeError, ValueError
    """
    if isinstance(score_mod, str):
        raise TypeError(
            "score_mod is C++, which cannot be differentiated: give a Python function of it"
        )
    if kernel is not None:
        raise ValueError(
            f"kernel: the dtype and the GPU choose that of gradients: leave {kernel!r} out"
        )
    return trace(score_mod, mask_mod, tuple(name for name in wrt if name not in WRT))


def gradients_on_gpu(
    call: Call,
    results: Results,
    given: Mapping[str, Any],
    arrays: tuple[Any, ...],
    mods: TracedFunctions,
    wrt: tuple[str, ...],
    deterministic: bool,
) -> tuple[Array, ...]:
    """Compute gradients of a call that is legal.

    Parameters
    ----------
    call : Call
    results : Results
    given : mapping
        The arrays that `wrt` may name, and dq, dk and dv: None for those that the caller has no
        place for.
    arrays : tuple
        Arrays that parts of the score read, in the order of `cufa.features.parts.ARRAYS`.
    mods : TracedFunctions
        As in `traced`.
    wrt : tuple of str
    deterministic : bool

    Returns
    -------
    tuple of array
        In the order of `wrt`.
    """
    import cupy

    problem, operands, view = call.problem, call.operands, call.view
    found: dict[str, Array] = {}
    for name in wrt:
        into = given.get(f"d{name}") if name in TENSORS else None  # a function may read a "dbias"
        found[name] = cupy.empty(given[name].shape, given[name].dtype) if into is None else into
    there = tuple(calls.on_device(name, array) for name, array in call.lengths.items())
    seed = operands.seed if "Dropout" in problem.score else None
    extras = Extras(arrays, there, mods.arrays, seed)
    views = Gradients(
        **{name: view(x) if name in TENSORS else x for name, x in found.items() if name in WRT},
        read={name: found[name] for name in mods.sums},
    )
    for name, array in found.items():
        if name not in WRT and name not in mods.sums:  # the function only refers to it
            array.fill(0)
    backward.attention_backward(problem, operands, results, views, extras, deterministic, call.ndim)
    return tuple(found.values())
