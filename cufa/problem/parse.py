"""Arrays -> `Problem`, and the errors that a user can make.

The results are integers that have been checked, and 4-D views in (batch, heads, seq, head_dim)
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from cufa import features
from cufa.arrays import Array, Ints, Operands, as_bhsd, module_of
from cufa.checks import (
    check_devices,
    check_dtype,
    check_dtypes,
    check_flag,
    check_layout,
    check_out,
    check_real,
    check_scale,
)
from cufa.features.expression.tracing import NOTHING, TracedFunctions
from cufa.problem.extras import arrays_of, parse_score_arrays, with_block_mask
from cufa.problem.lengths import with_lengths
from cufa.problem.problem import Problem, check_shapes
from cufa.problem.scales import SCALES, check_scaled

MAX_UNIFIED = 1e6
"""The largest preset maximum: float32 subtracts no larger score exactly enough."""


def layout_of(arguments: Mapping[str, Any]) -> str:
    """Return the order of the axes of a call's arrays; "thd" for `attention_varlen`."""
    layout: str = "thd" if "cu_seqlens_q" in arguments else arguments.get("layout", "bhsd")
    return layout


def axes_of(arguments: Mapping[str, Any]) -> int:
    """Return the axes of a call's q, as parts of the score count them."""
    return 4 if layout_of(arguments) == "thd" else len(arguments["q"].shape)


def tensors_of(arguments: Mapping[str, Any]) -> dict[str, Array]:
    """Return q, k and v of a call, or q and the caches of `decode`, and `out` if it is given."""
    names = ("q", "k_cache", "v_cache") if "k_cache" in arguments else ("q", "k", "v")
    out = {} if arguments.get("out") is None else {"out": arguments["out"]}
    return {**{name: arguments[name] for name in names}, **out}


def scales_of(arguments: Mapping[str, Any]) -> dict[str, Array]:
    """Return the scales of caches that a call has."""
    return {name: arguments[name] for name in SCALES if arguments.get(name) is not None}


def parse(
    arguments: Mapping[str, Any], xp: ModuleType, functions: TracedFunctions = NOTHING
) -> tuple[Problem, Operands]:
    """Check the arguments of a call and bring the arrays to 4-D. Nothing is written or copied.

    Arrays on the host are checked here for good. Lengths and tables on the device are read there
    alone, so there the kernels keep within the arrays, whatever they find.

    Parameters
    ----------
    arguments : mapping
        The arguments of `attention`, `attention_varlen` or `decode`, by name; arrays are there. A
        seed and functions are not looked at.
    xp : module
        The module that the arrays belong to.
    functions : TracedFunctions
        Its `score_mod` and `mask_mod`, traced.

    Returns
    -------
    Problem
    Operands
        (batch, heads, seq, head_dim) views of the arrays; of caches in pages, (pages, heads,
        page_size, head_dim). Offsets, tables, and lengths that go with them, are int32 if they are
        on the host.

    Raises
    ------
    TypeError
        For dtypes that are not supported or not the same, and arguments of the wrong type.
    ValueError
        For shapes, layout, scale and devices that do not fit, and an unusable `out`.
    """
    layout, arrays, scales = layout_of(arguments), tensors_of(arguments), scales_of(arguments)
    is_cached, is_packed = "k_cache" in arguments, "cu_seqlens_q" in arguments
    if not is_packed:
        check_layout(layout)
    if xp is np:  # subclasses (memmap, matrix) become the plain arrays that they are views of
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        scales = {name: np.asarray(scale) for name, scale in scales.items()}
    _check_ranks(arrays, is_packed, is_cached)
    dtype, kv_dtype = _dtypes(arrays, scales, xp) if is_cached else (check_dtypes(arrays), None)
    inputs = {name: array for name, array in arrays.items() if name != "out"}
    check_devices({**arrays, **scales}, xp)
    q, k, v = (as_bhsd(array, layout) for array in inputs.values())
    table = arguments.get("block_table")
    if table is not None:
        module_of("block_table", table)
    if is_cached:
        check_flag("causal", arguments["causal"])
    kv = "Dense" if not is_cached else "Contiguous" if table is None else "Paged"
    shown = tuple(array.shape for array in inputs.values())
    of_table = () if table is None else table.shape
    keys = check_shapes(kv, q.shape, k.shape, v.shape, shown, of_table)
    (batch, heads_q, seq_q, head_dim), (pages, heads_kv, page_size, head_dim_v) = q.shape, v.shape
    problem = Problem(
        *(dtype, batch, heads_q, heads_kv, seq_q, keys, head_dim, head_dim_v),
        check_scale(arguments.get("scale"), head_dim),
        features.parse(features.values_of(arguments)),
        kv,
        returns_lse=bool(arguments.get("return_lse")),
        unified_max=_checked_max(arguments.get("unified_max"), dtype, kv_dtype),
        kv_dtype=kv_dtype,
    )
    if kv == "Paged":
        problem = problem._replace(pages=pages, page_size=page_size)
    problem, lengths = with_lengths(problem, arguments, xp)
    score_arrays, ndim = arrays_of(arguments), axes_of(arguments)
    reads, views = parse_score_arrays(score_arrays, functions, ndim, problem.sizes, xp)
    if reads:
        problem = problem.reading(*reads)
    out = arrays.get("out")
    if out is not None:
        read = {**inputs, **score_arrays, **functions.read, **scales, **lengths}
        there = {name: array for name, array in read.items() if array is not None}
        check_out(out, restore_shape(problem, ndim, layout)[0], there)
        out = as_bhsd(out, layout)
    if arguments.get("block_mask") is not None:
        problem = with_block_mask(problem, arguments["block_mask"], xp)
    of_scales = tuple(x if layout == "bhsd" else x.swapaxes(1, 2) for x in scales.values())
    return problem, Operands(q, k, v, out, views, lengths=lengths, scales=of_scales)


def restore_shape(problem: Problem, ndim: int, layout: str) -> tuple[Ints, Ints]:
    """Shapes of the result and of its LSE, in the rank and layout of the caller's arrays.

    Parameters
    ----------
    problem : Problem
    ndim : int
        Rank of the caller's q: 2, 3 or 4.
    layout : str
        "bhsd" or "bshd", which matters for rank 4 only, and not for the LSE; or "thd".

    Returns
    -------
    tuple of int
        Shape of the result: (sq, dv), (b, sq, dv), (b, hq, sq, dv) or (b, sq, hq, dv); with "thd"
        (sq, hq, dv).
    tuple of int
        Shape of the LSE: (sq,), (b, sq) or (b, hq, sq); with "thd" (hq, sq).
    """
    b, h, s, d = problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v
    if layout == "thd":
        return (s, h, d), (h, s)
    if ndim == 2:
        return (s, d), (s,)
    if ndim == 3:
        return (b, s, d), (b, s)
    return ((b, h, s, d) if layout == "bhsd" else (b, s, h, d)), (b, h, s)


def _dtypes(
    arrays: Mapping[str, Array], scales: Mapping[str, Array], xp: ModuleType
) -> tuple[str, str | None]:
    """Return the dtype of q and the result, and that of caches of 8 bits."""
    check_dtype("q", arrays["q"])
    kv_dtype = check_scaled(arrays, scales)
    if kv_dtype is None:
        return check_dtypes(arrays), None
    dtype = check_dtypes({name: arrays[name] for name in ("q", "out") if name in arrays})
    if dtype == "float32" and xp is not np:
        raise TypeError(
            "q has dtype float32: on the GPU, caches of 8 bits take float16 and bfloat16; "
            "q.astype(numpy.float16) converts it"
        )
    return dtype, kv_dtype


def _check_ranks(arrays: Mapping[str, Array], is_packed: bool, is_cached: bool) -> None:
    q = arrays["q"]
    for name, array in arrays.items():
        shape, ndim = array.shape, array.ndim
        if is_packed and ndim != 3:
            raise ValueError(f"{name} has shape {shape}: (total, heads, head_dim) is needed")
        if name == "out":  # whose shape follows from the others
            continue
        if is_cached and ndim != 4:
            raise ValueError(f"{name} has shape {shape}: 4 axes are needed")
        if name == "q" and ndim not in (2, 3, 4):
            raise ValueError(
                f"q has shape {shape}: 4 axes, 3 (batch, seq, head_dim) or 2 (seq, head_dim) "
                "are needed"
            )
        if ndim != q.ndim:
            raise ValueError(
                f"{name} has shape {shape}, but q has shape {q.shape}: "
                "the number of axes must be the same"
            )


def _checked_max(unified_max: float | None, dtype: str, kv_dtype: str | None) -> float | None:
    """Return what takes the place of row maxima."""
    if unified_max is None:
        return None
    value = check_real("unified_max", unified_max, "a number or None")
    if dtype == "float32":
        raise ValueError("unified_max is for float16 and bfloat16, q has float32")
    if kv_dtype is not None:
        raise ValueError("unified_max must be None for caches of 8 bits: leave it out")
    if not abs(value) <= MAX_UNIFIED:
        raise ValueError(f"unified_max must be {MAX_UNIFIED} at most in magnitude, not {value!r}")
    return value
