"""Arrays -> launch of the kernels that decode."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cufa import device as devices
from cufa.arrays import Array, copied, padded, readable
from cufa.compiler import jit
from cufa.decode_problem import DecodeOperands, DecodeProblem
from cufa.launch.argument import launch
from cufa.launch.counters import is_capturing
from cufa.launch.scratch import of_device
from cufa.planner.decode import DecodePlan, plan
from cufa.variant import Variant

_TENSOR = [("data", "u8"), ("stride_batch", "i8"), ("stride_head", "i8"), ("stride_seq", "i8")]
_DIVISOR = [("multiplier", "u4"), ("shift", "i4"), ("divisor", "i4")]
_FIELDS = [
    *((name, _TENSOR) for name in "qkvo"),
    *((name, "u8") for name in ("lse", "partial", "lengths")),
    ("scale_log2", "f4"),
    *(
        (name, "i4")
        for name in (
            *(
                "batch",
                "heads_q",
                "heads_kv",
                "seq_q",
                "seq_kv",
                "head_dim",
                "head_dim_v",
                "splits",
            ),
        )
    ),
    *((name, _DIVISOR) for name in ("group", "row_tiles", "units", "blocks", "parts")),
]
PARAMS = np.dtype(_FIELDS, align=True)
"""The layout of ``DecodeParams`` in ``kernels/decode_params.cuh``."""

_PAGED = [
    *(("block_table", "u8"), ("table_stride", "i4"), ("pages", "i4")),
    ("page_size", _DIVISOR),
]
PAGED = np.dtype([("params", PARAMS), ("kv", np.dtype(_PAGED, align=True))], align=True)
"""The same, followed by ``Paged`` of ``kernels/paged.cuh``."""

_LOG2_E = math.log2(math.e)
_TINY = float(np.finfo(np.float32).tiny)


def decode(
    problem: DecodeProblem,
    operands: DecodeOperands,
    return_lse: bool,
    num_splits: int | None,
    kernel: str | Variant | None,
) -> Array | None:
    """Decode on the current device and stream.

    Parameters
    ----------
    problem : DecodeProblem
        Possibly empty.
    operands : DecodeOperands
        Checked; `out` is there. Lengths and table may be NumPy arrays, whose values are legal.
    return_lse : bool
    num_splits, kernel
        As of `cufa.decode`.

    Returns
    -------
    array or None
        The log-sum-exp, (batch, heads_q, seq_q) float32, if asked for.
    """
    import cupy

    shape = problem.batch, problem.heads_q, problem.seq_q
    lse = cupy.empty(shape, np.float32) if return_lse else None
    if 0 in shape:
        return lse
    device_id = cupy.cuda.runtime.getDevice()
    gpu = devices.of_id(device_id)
    chosen = plan(problem, gpu, num_splits, kernel)
    if problem.capacity == 0 or 0 in operands.k_cache.shape:
        operands.out[...] = 0
        if lse is not None:
            lse[...] = -np.inf
        return lse
    taken, written = _taken(problem, operands)
    function = jit.kernel(chosen.variant, gpu, device_id)
    partial = of_device(device_id).take(chosen.partial_floats) if chosen.partial_floats else None
    parameter = filled(problem, taken, chosen, lse, partial.address if partial else 0)
    launch(function, (chosen.grid, 1, 1), chosen.block, parameter, chosen.smem_bytes)
    del partial
    if written is not operands.out:
        operands.out[...] = written
    return lse


def _taken(problem: DecodeProblem, operands: DecodeOperands) -> tuple[DecodeOperands, Array]:
    """Return operands that the kernel can read, and where it writes."""
    import cupy

    changes: dict[str, Any] = {}
    for name in ("q", "k_cache", "v_cache"):
        array = getattr(operands, name)
        negate = name == "q" and problem.scale < 0
        if negate or not (
            array.data.ptr % 16 == 0
            and readable(array.shape, array.strides, array.itemsize, False, name != "q")
        ):
            _refuse_capture(name, array)
            changes[name] = copied(array, negate=negate)
    for name in ("lengths", "block_table"):
        array = getattr(operands, name)
        if isinstance(array, np.ndarray):
            _refuse_capture(name, array)
            changes[name] = cupy.asarray(array)
    out = operands.out
    if out.shape[3] > 1 and out.strides[3] != out.itemsize:
        _refuse_capture("out", out)
        changes["out"] = padded(out.shape, out.dtype, cupy.ndarray)
    taken = operands._replace(**changes)
    return taken, taken.out


def _refuse_capture(name: str, array: Array) -> None:
    if is_capturing():
        raise ValueError(
            f"{name} (shape {array.shape}, strides {array.strides}) would be copied, for which a "
            "call that is captured into a CUDA graph has no place"
        )


def filled(
    problem: DecodeProblem,
    operands: DecodeOperands,
    chosen: DecodePlan,
    lse: Array | None,
    partial: int,
) -> np.ndarray:
    """Return the kernel's parameter."""
    parameter = np.zeros(1, PAGED if problem.is_paged else PARAMS)
    p: Any = parameter[0]
    if problem.is_paged:
        table = operands.block_table
        stride = table.strides[0] // table.itemsize
        p["kv"] = table.data.ptr, stride, problem.pages, divisor(problem.page_size)
        p = p["params"]
    names = {"q": "q", "k": "k_cache", "v": "v_cache", "o": "out"}
    for name, of in names.items():
        array = getattr(operands, of)
        p[name] = (array.data.ptr, *(step // array.itemsize for step in array.strides[:3]))
    p["lse"] = 0 if lse is None else lse.data.ptr
    p["partial"] = partial
    p["lengths"] = 0 if operands.lengths is None else operands.lengths.data.ptr
    p["scale_log2"] = max(abs(problem.scale) * _LOG2_E, _TINY)
    for name in ("batch", "heads_q", "heads_kv", "seq_q", "head_dim", "head_dim_v"):
        p[name] = getattr(problem, name)
    p["seq_kv"], p["splits"] = problem.capacity, chosen.splits
    p["group"], p["row_tiles"] = divisor(problem.group), divisor(chosen.row_tiles)
    p["units"] = divisor(problem.heads_kv * chosen.row_tiles)
    p["blocks"], p["parts"] = divisor(chosen.grid), divisor(chosen.parts)
    return parameter


def divisor(n: int) -> tuple[int, int, int]:
    """Return what ``Divisor`` of ``kernels/decode_params.cuh`` holds of a number below 2^31."""
    if n == 1:
        return 0, 0, 1
    shift = (n - 1).bit_length() - 1
    return -(-(1 << (32 + shift)) // n), shift, n
