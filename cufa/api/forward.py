"""Calls of `attention`, `attention_varlen` and `decode` that `launch.calls` does not run.

They are new, or in 8 bits, or on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cufa import device as devices
from cufa.api import fp8_gpu
from cufa.api.arguments import Call, call_of, functions_on_cpu
from cufa.cpu import attention as cpu
from cufa.features.expression.tracing import NOTHING, TracedFunctions
from cufa.launch import calls, fp8_calls
from cufa.launch.prepare import PreparedCalls
from cufa.planner.attention import Planner
from cufa.planner.decode import DecodePlan
from cufa.planner.fp8 import Fp8Plan
from cufa.planner.plan import Plan
from cufa.problem.extras import Extras
from cufa.problem.parse import layout_of
from cufa.tuned import user_table

AnyPlan = Plan | DecodePlan | Fp8Plan | cpu.Plan


def run_in_8_bits_or_on_cpu(arguments: Mapping[str, Any]) -> Any:
    """Run a call by its arguments: in 8 bits, at once if it is remembered, or on the CPU."""
    key = fp8_calls.CALLS.key_of(arguments)
    result = None if key is None else fp8_calls.run(key, arguments)
    if result is not None:
        return result
    call = call_of(arguments)
    return _on_cpu(call) if call.xp is np else fp8_gpu.attention(call, key)


def run_new(
    arguments: Mapping[str, Any],
    choices: tuple[Any, ...],
    common: tuple[Any, ...],
    extras: Extras,
    mods: TracedFunctions = NOTHING,
    padded: bool = False,
) -> Any:
    """Run a call on CuPy arrays that `calls.run` does not run without its kind.

    Parameters
    ----------
    arguments : mapping
        The arguments of the call, by name.
    choices, common, extras
        As in `cufa.launch.calls.run`.
    mods : TracedFunctions
        The caller's functions.
    padded
        As in `PreparedCalls`.
    """
    call = call_of(arguments, mods)
    problem, given = call.problem, call.arguments
    kernel, parts = given["kernel"], given.get("num_splits")
    if problem.is_cached and problem.is_empty:  # even then, check the kernel
        Planner(problem, devices.current(), kernel, num_splits=parts)(problem)
    kind = PreparedCalls(
        *(problem, layout_of(given), extras, kernel),
        batch_invariant=given.get("batch_invariant", False),
        num_splits=parts,
        padded=padded,
    )
    q, k, v, out = (given[name] for name in kind.names)
    return calls.run(q, k, v, out, choices, common, extras, kind)


def explained(arguments: Mapping[str, Any]) -> AnyPlan:
    """Return how a call, given by its arguments, would run."""
    call = call_of(arguments)
    problem, kernel = call.problem, arguments["kernel"]
    if call.xp is np:
        functions_on_cpu(call.arguments)
        return cpu.plan(problem.alike)
    if call.fp8 is not None:
        return fp8_gpu.planned(call)
    device, is_invariant = devices.current(), arguments.get("batch_invariant", False)
    table = user_table(device) if problem.kv == "Dense" else None  # others are not tuned
    return Planner(problem, device, kernel, table, is_invariant).explained(problem)


def _on_cpu(call: Call) -> Any:
    """Run a call on NumPy arrays."""
    functions, out = functions_on_cpu(call.arguments), call.arguments["out"]
    problem, operands = call.problem, call.operands
    if call.fp8 is not None:
        problem, operands = call.fp8.applied(problem, operands)
    shape, lse_shape = call.shapes
    if out is None:
        out = np.empty(shape, call.arguments["q"].dtype)
        operands = operands._replace(out=call.view(out))
    else:
        functions.check_apart("out", out)
    result = operands.out
    if functions.is_called:  # if they raise, `out` is as it was
        operands = operands._replace(out=result.copy())
    lse = cpu.attention(problem, operands, functions)
    if result is not operands.out:
        result[...] = operands.out
    return (out, lse.reshape(lse_shape)) if call.arguments["return_lse"] else out
