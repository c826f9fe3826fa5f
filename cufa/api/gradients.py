"""The code that `attention_backward`, `attention_varlen_backward` and their `explain` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cufa import device as devices
from cufa.api.arguments import Call, call_of, functions_on_cpu
from cufa.arrays import Array, module_of_all
from cufa.checks import check_flag
from cufa.cpu import attention as cpu
from cufa.cpu.backward import attention_backward as on_cpu
from cufa.features.dropout import check_dropout
from cufa.features.expression.tracing import check, read_by
from cufa.launch import backward, gradient_calls
from cufa.launch.array_sums import wanted_of
from cufa.planner.backward import BackwardPlan
from cufa.planner.backward_model import explained as plan_explained
from cufa.problem.extras import arrays_of
from cufa.problem.parse_backward import (
    TENSORS,
    WRT,
    Gradients,
    Results,
    check_gradients,
    check_results,
    check_wrt,
)
from cufa.tuned import user_table

FORWARD = ("dout", "out", "lse")
INTO = tuple(f"d{name}" for name in TENSORS)


def gradients_of(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Compute gradients, whatever says how long sequences are.

    Parameters
    ----------
    given : mapping
        The arguments of `attention_backward`, or of `attention_varlen_backward`, by name.
    """
    key = gradient_calls.key_of(given)
    known = None if key is None else gradient_calls.run(key, given)
    if known is not None:
        return known
    call, wrt, named = _checked(given)
    forward, into = ({name: given[name] for name in names} for names in (FORWARD, INTO))
    dout, out, lse = check_results(forward, given["q"], call.shapes, call.xp)
    results = Results(call.view(dout), call.view(out), lse.reshape(call.operands.q.shape[:3]))
    inputs = {name: given[name] for name in (*TENSORS, *FORWARD, *call.operands.lengths)}
    check_gradients(into, {**inputs, **arrays_of(given), **call.mods.read}, call.xp)
    found: dict[str, Array] = {}
    for name in wrt:
        place = into.get(f"d{name}") if name in TENSORS else None  # a function may read a "dbias"
        array = named[name]
        found[name] = call.xp.empty(array.shape, array.dtype) if place is None else place
    if call.xp is np:
        _on_cpu(call, results, found)
        return tuple(found.values())
    prepared = _on_gpu(call, results, found)
    copies_lse = results.lse.data.ptr != given["lse"].data.ptr
    if key is not None and prepared is not None and not copies_lse:
        gradient_calls.CALLS.remember(key, prepared)
    return tuple(found.values())


def explained(given: Mapping[str, Any]) -> BackwardPlan | cpu.Plan:
    """Return how a call would run; by the arguments of `explain_backward`."""
    call, wrt, named = _checked({**given, "kernel": None})
    if call.xp is np:
        functions_on_cpu(call.arguments, _read_of(wrt))
        return cpu.plan(call.problem)
    device = devices.current()
    sums = Gradients(
        bias=given["bias"] if "bias" in wrt else None,
        read={name: named[name] for name in call.mods.sums},
    )
    wanted, table = wanted_of(call.problem, sums, call.ndim), user_table(device)
    how = wrt, call.arguments["deterministic"]
    return plan_explained(call.problem, device, *how, wanted=wanted, table=table)


def _checked(given: Mapping[str, Any]) -> tuple[Call, tuple[str, ...], dict[str, Any]]:
    """Check the arguments of the forward call, and by which arrays it is differentiated.

    Returns
    -------
    Call
    tuple of str
        The names of the arrays by which it is differentiated.
    dict
        The arrays that this may name, and dq, dk and dv: None for those that the caller has no
        place for.
    """
    deterministic = check_flag("deterministic", given["deterministic"])
    arguments = {**given, "deterministic": deterministic, "out": None, "return_lse": True}
    tensors = {name: given[name] for name in TENSORS}
    forward = {name: given[name] for name in FORWARD if name in given}
    into = {name: given.get(name) for name in INTO}
    written = {name: array for name, array in into.items() if array is not None}
    xp = module_of_all({**tensors, **forward, **written})
    arguments["dropout_p"] = check_dropout(given["dropout_p"])
    score_mod, read = given["score_mod"], {}
    if score_mod is not None and not isinstance(score_mod, str):
        read = read_by(check("score_mod", score_mod))
    named = {**read, **tensors, **arrays_of(given), **into}
    wrt = check_wrt(given["wrt"], named, read)
    if xp is not np and isinstance(score_mod, str):
        raise TypeError(
            "score_mod is C++, which cannot be differentiated: give a Python function of it"
        )
    if xp is not np and given["kernel"] is not None:
        raise ValueError(
            f"kernel: the dtype and the GPU choose that of gradients: leave {given['kernel']!r} out"
        )
    return call_of(arguments, wrt=_read_of(wrt)), wrt, named


def _read_of(wrt: tuple[str, ...]) -> tuple[str, ...]:
    """Return those that are arrays which a `score_mod` reads."""
    return tuple(name for name in wrt if name not in WRT)


def _on_gpu(call: Call, results: Results, found: Mapping[str, Array]) -> backward.Prepared | None:
    """Compute gradients of CuPy arrays; arguments as `_on_cpu` takes them.

    Returns the launches, if those of a call like this one need nothing else.
    """
    extras, sums = call.extras(), call.mods.sums
    for name, array in found.items():
        if name not in WRT and name not in sums:  # the function only refers to it
            array.fill(0)
    views = {name: call.view(x) if name in TENSORS else x for name, x in found.items()}
    whole = call.problem, call.operands, results, _gradients(views, sums), extras
    return backward.attention_backward(*whole, call.arguments["deterministic"], call.ndim)


def _on_cpu(call: Call, results: Results, found: Mapping[str, Array]) -> None:
    """Compute gradients of NumPy arrays.

    Parameters
    ----------
    call : Call
    results : Results
    found : mapping
        Where the gradients go, by the names of the arrays.
    """
    read = _read_of(tuple(found))
    functions = functions_on_cpu(call.arguments, read)
    sums: dict[str, np.ndarray] = {}
    for name, array in found.items():
        if name not in TENSORS:
            # One number of an array that a function reads may have as many addends as scores.
            sums[name] = np.zeros(array.shape, np.float32 if name in WRT else np.float64)
            continue
        functions.check_apart(f"d{name}", array)
        # Whatever functions raise, dq, dk and dv are whole.
        sums[name] = (
            np.empty(array.shape, array.dtype) if functions.is_called else np.asarray(array)
        )
    views = _gradients(sums, read).viewed(call.view, call.ndim)
    whole = call.problem, call.operands._replace(out=results.out), results, views
    on_cpu(*whole, functions)
    for name, array in found.items():
        if sums[name] is not array:
            array[...] = sums[name]


def _gradients(arrays: Mapping[str, Array], read: Iterable[str]) -> Gradients:
    """Return gradients by name, those of arrays that a function reads by `read`."""
    of_arguments = {name: x for name, x in arrays.items() if name in WRT}
    return Gradients(**of_arguments, read={name: arrays[name] for name in read})
