"""Attention of arrays in 8 bits on a GPU: from `Quantized` to the launch of the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa import device as devices
from cufa.api.arguments import Call
from cufa.arrays import ALIGNMENT, Array, padded, readable
from cufa.checks import check_apart, check_devices
from cufa.dtypes import DTYPES
from cufa.features.parts import ARRAYS
from cufa.launch import fp8 as launch
from cufa.launch import fp8_calls, quantize
from cufa.launch.calls import nothing
from cufa.launch.capture import is_capturing
from cufa.launch.clear_rows import clear_rows
from cufa.launch.signature import Key
from cufa.planner.fp8 import Fp8Plan, plan_fp8
from cufa.problem.extras import Extras
from cufa.problem.parse import layout_of
from cufa.problem.problem import Problem
from cufa.quantized.quantized import Quantized
from cufa.quantized.transposed import transposed
from cufa.specs.fp8_wgmma import KEYS, SPEC
from cufa.specs.variant import Variant

_SIGN = np.uint8(0x80)  # of a number of 8 bits


def planned(call: Call) -> Fp8Plan:
    """Return the plan of a call on CuPy arrays in 8 bits.

    Raises
    ------
    TypeError, ValueError
        The kernel cannot run this.
    """
    problem, fp8, cupy = call.problem, call.fp8, call.xp
    assert fp8 is not None
    if problem.seq_kv == 0 and problem.kv == "Dense":
        problem = problem._replace(kv="Padded")
    plan = plan_fp8(problem, devices.current(), call.arguments["kernel"])
    if not fp8.is_quantized:
        check_devices(fp8.given, cupy)
        return plan
    for name, x in fp8.given.items():
        check_devices({name: x.values, f"{name}.scales": x.scales}, cupy)
        if x.mean is not None:
            raise ValueError(
                f"{name} was quantized with smooth=True: {SPEC.name} adds no mean; it takes "
                "arrays without, and NumPy arrays run on the CPU"
            )
        if problem.kv == "Varlen":
            _check_sequences(name, x, problem.sequences)
        if name != "q" and x.block is not None and x.block < KEYS:
            raise ValueError(
                f"{name} was quantized with block={x.block}: {SPEC.name} takes blocks of {KEYS} "
                "rows or more, a scale a head, or one of the tensor"
            )
    return plan


def _check_sequences(name: str, x: Quantized, sequences: int) -> None:
    """Refuse sequences that have no blocks of their own, or are not as many as those of a call."""
    argument = "cu_seqlens_q" if name == "q" else "cu_seqlens_k"
    if x.cu_seqlens is None:
        raise ValueError(
            f"{name} was quantized without cu_seqlens: {SPEC.name} takes sequences in blocks of "
            f"their own; cufa.quantize({name}, layout='thd', cu_seqlens={argument}) makes them"
        )
    if x.cu_seqlens.size != sequences + 1:
        raise ValueError(
            f"{name} was quantized with {x.cu_seqlens.size - 1} sequences in cu_seqlens, but "
            f"{argument} has {sequences}"
        )


def attention(call: Call, key: Key | None) -> Any:
    """Run a call of `attention` or `attention_varlen` on CuPy arrays in 8 bits.

    Parameters
    ----------
    call : Call
    key : tuple or None
        Its key, if `cufa.launch.fp8_calls` may remember it.

    Raises
    ------
    TypeError, ValueError
        The kernel cannot run this; or it needs memory of its own in a capture.
    """
    problem, fp8, cupy, given = call.problem, call.fp8, call.xp, call.arguments
    assert fp8 is not None
    plan, extras, out = planned(call), call.extras(), given["out"]
    if problem.is_empty:
        return nothing(problem, layout_of(given), given["q"], out, given["return_lse"])
    if not fp8.is_quantized:
        _refuse_capture("precision", "q, k and v would be quantized: give what cufa.quantize makes")
    elif out is not None:
        for name, x in fp8.given.items():
            check_apart("out", out, {name: x.values, f"{name}.scales": x.scales})
    shape, lse_shape = call.shapes
    result = cupy.empty(shape, DTYPES[problem.dtype].numpy) if out is None else out
    lse = cupy.empty(lse_shape, np.float32) if given["return_lse"] else None
    is_packed = problem.kv == "Varlen"
    problem = problem._replace(precision="fp8")
    lengths = dict(zip(call.operands.lengths, extras.lengths, strict=True))
    arrays, launches = fp8.arrays(lengths, transposed=True)
    quantize.run(launches)
    operands = _operands(arrays, problem)
    if problem.seq_kv == 0 and not is_packed:
        problem, operands, extras = _with_hidden_key(problem, operands, extras, plan.variant)
    problem = problem._replace(scale=abs(problem.scale))
    view = call.view(result)
    into = _writable(view)
    if into is not view and is_packed:  # where rows that no sequence has stay as they are
        into[...] = view
    its = launch.prepared(plan, problem, operands, into, extras, call.ndim)
    values, scales = [x.values for x in operands], [x.scales for x in operands]
    its(*launch.addresses(values, scales, into, lse), *extras.addresses(plan.variant))
    if into is not view:
        view[...] = into
    clears = None
    if is_packed and not isinstance(call.operands.lengths["cu_seqlens_q"], np.ndarray):
        clears = problem.max_seqlen_q
        clear_rows(result if out is None else None, lse, extras.lengths[0], clears)
    copies_lengths = any(lengths[name] is not x for name, x in call.operands.lengths.items())
    is_plain = into is view and not copies_lengths
    if key is not None and is_plain and _are_read(operands, arrays, launches, fp8.given):
        names = (*ARRAYS, *lengths) if any(x is not None for x in extras.flat) else ()
        quantizers = tuple(each.quantizer for each in launches)
        known = fp8_calls.Known(its, names, clears, quantizers, shape, lse_shape, result.dtype)
        fp8_calls.CALLS.remember(key, known)
    return result if lse is None else (result, lse)


def _operands(arrays: dict[str, Quantized], problem: Problem) -> launch.Operands:
    """Return arrays as the kernel takes them: as they are, or else copies."""
    values = {name: x.values for name, x in arrays.items()}
    values["q"] = _contiguous("q", values["q"])
    if problem.scale < 0:
        _refuse_capture("scale", f"it is {problem.scale}: q would be copied with the other sign")
        values["q"] = values["q"] ^ _SIGN
    if not arrays["v"].transposed:
        _refuse_capture("v", "it would be transposed: cufa.quantize(v, transposed=True) does that")
        values["v"] = transposed(values["v"], arrays["v"].module)
    return launch.Operands(
        *(
            launch.Operand(_contiguous(name, values[name]), _contiguous(name, x.scales), x.block)
            for name, x in arrays.items()
        )
    )


def _are_read(
    operands: launch.Operands,
    arrays: dict[str, Quantized],
    launches: list[quantize.Launches],
    given: dict[str, Any],
) -> bool:
    """Whether kernels read the caller's arrays, and what was quantized, where they are."""
    stored = zip(operands, arrays.values(), strict=True)
    if any(x.values is not y.values or x.scales is not y.scales for x, y in stored):
        return False
    # There are no launches for arrays in 8 bits, else one for each array.
    read = zip(launches, given.values(), strict=bool(launches))
    return all(each.x.data.ptr == x.data.ptr for each, x in read)


def _contiguous(name: str, array: Array) -> Array:
    """Return an array, or a copy if it is not contiguous or not aligned."""
    if array.flags.c_contiguous and array.data.ptr % ALIGNMENT == 0:
        return array
    _refuse_capture(name, "it would be copied: give one whose values and scales are contiguous")
    return array.copy()


def _with_hidden_key(
    problem: Problem, operands: launch.Operands, extras: Extras, variant: Variant
) -> tuple[Problem, launch.Operands, Extras]:
    """Return a call without keys as one with a key that no sequence has: the kernel reads one."""
    _refuse_capture("k", "it has no keys")
    import cupy

    heads = problem.batch, problem.heads_kv
    of_all = cupy.empty((1, 1, 1), np.float32)
    of_all.fill(1)
    k = cupy.zeros((*heads, 1, variant.head_dim), np.uint8)
    v = cupy.zeros((*heads, 1, variant.head_dim_v, KEYS), np.uint8)
    keys = cupy.zeros(problem.batch, np.int32)
    lengths = keys, *(extras.lengths[1:] or (None,))
    return (
        problem._replace(seq_kv=1, kv="Padded"),
        launch.Operands(
            operands.q, launch.Operand(k, of_all, None), launch.Operand(v, of_all, None)
        ),
        extras._replace(lengths=lengths),
    )


def _writable(view: Array) -> Array:
    """Return a result, (batch, heads, seq, head_dim), or memory in its place if rows are odd."""
    if view.data.ptr % ALIGNMENT == 0 and readable(view.shape, view.strides, view.itemsize):
        return view
    _refuse_capture("out", "it would be copied: give one whose rows are a multiple of 16 bytes")
    import cupy

    return padded(view.shape, view.dtype, cupy.empty)


def _refuse_capture(name: str, why: str) -> None:
    if is_capturing():
        raise ValueError(
            f"{name}: {why}. A call that is captured into a CUDA graph has no place for memory "
            "that is free after it"
        )
