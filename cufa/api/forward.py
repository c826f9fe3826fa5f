"""What `attention` and `attention_varlen` share: calls of new kinds, on the CPU, and in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cufa import device as devices
from cufa.api import fp8_gpu
from cufa.api.arguments import Call, call_of, functions_on_cpu
from cufa.arrays import Array
from cufa.cpu import attention as cpu
from cufa.cpu.lengths import attention_of_lengths
from cufa.features.expression.tracing import TracedFunctions
from cufa.features.parts import ARRAYS
from cufa.launch.prepare import PreparedCalls
from cufa.planner.attention import Planner
from cufa.planner.decode import DecodePlan
from cufa.planner.fp8 import Fp8Plan
from cufa.planner.plan import Plan
from cufa.problem.extras import Extras
from cufa.problem.lengths import LENGTHS
from cufa.problem.parse import layout_of
from cufa.tuned import user_table


def other(arguments: Mapping[str, Any]) -> Any:
    """Run a call on the CPU, or in 8 bits, by its arguments."""
    call = call_of(arguments)
    return _on_cpu(call) if call.xp is np else fp8_gpu.attention(call)


def new_kind(
    tensors: tuple[Array | None, ...],
    choices: tuple[Any, ...],
    extras: Extras,
    kv: str,
    names: tuple[str, ...],
    mods: TracedFunctions,
) -> PreparedCalls:
    """Check a call in full, and return its kind.

    Parameters
    ----------
    tensors : tuple
        q, k, v and out.
    choices, extras
        As in `cufa.launch.calls.run`.
    kv : str
        "Padded" or "Varlen": what the lengths among the extras are.
    names : tuple of str
        The names of the choices.
    mods : TracedFunctions
        The caller's functions.
    """
    arguments: dict[str, Any] = dict(zip(("q", "k", "v", "out"), tensors, strict=True))
    arguments |= zip((*names, "seed"), (*choices, extras.seed), strict=True)
    arguments |= zip(ARRAYS, extras.arrays, strict=False)  # or there are none of them
    arguments |= zip(LENGTHS[kv], extras.lengths, strict=False)
    problem, layout = call_of(arguments, mods).problem, layout_of(arguments)
    is_invariant = arguments.get("batch_invariant", False)
    return PreparedCalls(problem, layout, extras, arguments["kernel"], batch_invariant=is_invariant)


def explained(arguments: Mapping[str, Any]) -> Plan | DecodePlan | Fp8Plan | cpu.Plan:
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
    if functions.is_called:  # whatever they raise, `out` is whole
        operands = operands._replace(out=result.copy())
    if problem.kv == "Dense":
        _, lse = cpu.attention(problem, operands, functions)
    else:
        lse = attention_of_lengths(problem, operands, operands.lengths, functions)
    if result is not operands.out:
        result[...] = operands.out
    return (out, lse.reshape(lse_shape)) if call.arguments["return_lse"] else out
