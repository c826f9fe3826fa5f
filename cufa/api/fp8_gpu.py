"""Attention of arrays in 8 bits on a GPU: from `Quantized` to the launch of the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from cufa import device as devices
from cufa.api.fp8 import Fp8, Rows
from cufa.arrays import ALIGNMENT, Array, as_bhsd, padded, readable
from cufa.checks import check_apart, check_devices
from cufa.dtypes import DTYPES
from cufa.launch import fp8 as launch
from cufa.launch.capture import is_capturing
from cufa.planner.fp8 import Fp8Plan, plan_fp8
from cufa.problem.extras import Extras
from cufa.problem.parse import restore_shape
from cufa.problem.problem import Problem
from cufa.quantized.quantized import Quantized
from cufa.quantized.transposed import transposed
from cufa.specs.fp8_wgmma import KEYS, SPEC
from cufa.specs.variant import Variant

_SIGN = np.uint8(0x80)  # of a number of 8 bits


def planned(fp8: Fp8, problem: Problem, kernel: object) -> Fp8Plan:
    """Return the plan of a call on CuPy arrays.

    Parameters
    ----------
    fp8 : Fp8
    problem : Problem
        The problem of arrays `like` these.
    kernel : object
        The caller's.

    Raises
    ------
    TypeError, ValueError
        The kernel cannot run this.
    """
    import cupy

    device = devices.of_id(cupy.cuda.runtime.getDevice())
    if problem.seq_kv == 0 and problem.kv == "Dense":
        problem = problem._replace(kv="Padded")
    plan = plan_fp8(problem, device, kernel)
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


def attention(
    fp8: Fp8,
    rows: Rows,
    problem: Problem,
    out: Array | None,
    return_lse: bool,
    layout: str,
    kernel: object,
    extras: Extras,
) -> Any:
    """Run a call of `attention` on CuPy arrays, or one of `attention_varlen`.

    Parameters
    ----------
    fp8 : Fp8
    rows : Rows
        Its arrays are on the device, int32 and contiguous.
    problem : Problem
        The problem of arrays `like` these.
    out, return_lse, layout, kernel
        The caller's. With sequences that follow each other, `out` has an axis more, and `layout`
        is "bshd".
    extras : Extras
        The extras of the call, on the device.

    Returns
    -------
    array, or two
        As `attention` returns them; with sequences that follow each other, with an axis more.

    Raises
    ------
    TypeError, ValueError
        The kernel cannot run this; or it needs memory of its own in a capture.
    """
    import cupy

    plan = planned(fp8, problem, kernel)
    is_ragged = problem.kv == "Varlen"
    ndim = 4 if is_ragged else len(fp8.given["q"].shape)
    shape, lse_shape = restore_shape(problem, ndim, layout)
    if fp8.is_quantized:
        if out is not None:
            for name, x in fp8.given.items():
                check_apart("out", out, {name: x.values, f"{name}.scales": x.scales})
    else:
        _refuse_capture("precision", "q, k and v would be quantised: give what cufa.quantize makes")
    result = cupy.empty(shape, DTYPES[problem.dtype].numpy) if out is None else out
    lse = cupy.empty(lse_shape, np.float32) if return_lse else None
    if 0 not in shape:
        problem = problem._replace(precision="fp8")
        operands = _operands(fp8.arrays(rows, transposed=True), problem)
        if problem.seq_kv == 0 and not is_ragged:
            problem, operands, extras = _with_hidden_key(problem, operands, extras, plan.variant)
        problem = problem._replace(scale=abs(problem.scale))
        view = as_bhsd(result, layout)
        into = _writable(view)
        if into is not view and is_ragged:  # where rows that no sequence has stay as they are
            into[...] = view
        launch.attention(plan, problem, operands, into, lse, extras, ndim)
        if into is not view:
            view[...] = into
    return result if lse is None else (result, lse)


def _operands(arrays: dict[str, Quantized], problem: Problem) -> launch.Operands:
    """Return arrays as the kernel takes them: as they are, or else copies."""
    q, k, v = arrays.values()
    values_q, values_v = _contiguous("q", q.values), v.values
    if problem.scale < 0:
        _refuse_capture("scale", f"it is {problem.scale}: q would be copied with the other sign")
        values_q = values_q ^ _SIGN
    if not v.transposed:
        _refuse_capture("v", "it would be transposed: cufa.quantize(v, transposed=True) does that")
        values_v = transposed(values_v, v.module)
    found = zip((q, k, v), (values_q, k.values, values_v), "qkv", strict=True)
    return launch.Operands(
        *(
            launch.Operand(_contiguous(name, values), _contiguous(name, x.scales), x.block)
            for x, values, name in found
        )
    )


def _contiguous(name: str, array: Array) -> Array:
    """Return an array, or a copy if it is not contiguous or not aligned."""
    if array.flags.c_contiguous and array.data.ptr % ALIGNMENT == 0:
        return array
    _refuse_capture(name, "it would be copied: give one whose values and scales are contiguous")
    import cupy

    copy = cupy.empty(array.shape, array.dtype)
    copy[...] = array
    return copy


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
