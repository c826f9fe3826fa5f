"""Arrays -> `Problem`, and the errors that a user can make.

The results are integers that have been checked, and 4-D views in (batch, heads, seq, head_dim)
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from cufa.arrays import Array, Ints, Operands, as_bhsd
from cufa.checks import check_devices, check_dtypes, check_layout, check_out
from cufa.features import values_of
from cufa.features.expression.tracing import NOTHING, TracedFunctions
from cufa.problem.extras import arrays_of, parse_score_arrays, with_block_mask
from cufa.problem.lengths import with_lengths
from cufa.problem.problem import Problem, from_shapes


def layout_of(arguments: Mapping[str, Any]) -> str:
    """Return the order of the axes of a call's arrays; "thd" for `attention_varlen`."""
    layout: str = "thd" if "cu_seqlens_q" in arguments else arguments.get("layout", "bhsd")
    return layout


def axes_of(arguments: Mapping[str, Any]) -> int:
    """Return the axes of a call's q, as parts of the score count them."""
    return 4 if layout_of(arguments) == "thd" else len(arguments["q"].shape)


def parse(
    arguments: Mapping[str, Any], xp: ModuleType, functions: TracedFunctions = NOTHING
) -> tuple[Problem, Operands]:
    """Check the arguments of a call and bring the arrays to 4-D. Nothing is written or copied.

    Parameters
    ----------
    arguments : mapping
        The arguments of `attention`, or of `attention_varlen`, by name; q, k and v are there. A
        seed and functions are not looked at.
    xp : module
        The module that the arrays belong to.
    functions : TracedFunctions
        Its `score_mod` and `mask_mod`, traced.

    Returns
    -------
    Problem
    Operands
        (batch, heads, seq, head_dim) views of the arrays. Lengths that are on the host are int32 if
        sequences are packed.

    Raises
    ------
    TypeError
        For dtypes that are not supported or not the same, and arguments of the wrong type.
    ValueError
        For shapes, layout, scale and devices that do not fit, and an unusable `out`.
    """
    layout, out = layout_of(arguments), arguments.get("out")
    inputs: dict[str, Array] = {name: arguments[name] for name in "qkv"}
    arrays = inputs if out is None else {**inputs, "out": out}
    if "cu_seqlens_q" in arguments:
        _check_packed(arrays)
    else:
        check_layout(layout)
    if xp is np:  # subclasses (memmap, matrix) become the plain arrays that they are views of
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
    dtype = check_dtypes(arrays)
    inputs, out = {name: arrays[name] for name in "qkv"}, arrays.get("out")
    _check_ranks(**inputs)
    if xp is not np:
        check_devices(arrays, xp)
    q, k, v = (as_bhsd(array, layout) for array in inputs.values())
    problem = from_shapes(
        *(dtype, q.shape, k.shape, v.shape),
        scale=arguments.get("scale"),
        asked=values_of(arguments),
        shown=tuple(array.shape for array in inputs.values()),
    )
    problem, lengths = with_lengths(problem, arguments, xp)
    score_arrays = arrays_of(arguments)
    ndim = axes_of({**arguments, "q": inputs["q"]})
    reads, views = parse_score_arrays(score_arrays, functions, ndim, problem.sizes, xp)
    problem = problem.reading(*reads)._replace(returns_lse=bool(arguments.get("return_lse")))
    if out is not None:
        read = {**inputs, **score_arrays, **functions.read, **lengths}
        there = {name: array for name, array in read.items() if array is not None}
        check_out(out, restore_shape(problem, ndim, layout)[0], there)
        out = as_bhsd(out, layout)
    if arguments.get("block_mask") is not None:
        problem = with_block_mask(problem, arguments["block_mask"], xp)
    return problem, Operands(q, k, v, out, views, lengths=lengths)


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


def _check_packed(arrays: Mapping[str, Array]) -> None:
    for name, array in arrays.items():
        if array.ndim != 3:
            raise ValueError(f"{name} has shape {array.shape}: (total, heads, head_dim) is needed")


def _check_ranks(q: Array, k: Array, v: Array) -> None:
    if q.ndim not in (2, 3, 4):
        raise ValueError(
            f"q has shape {q.shape}: 4 axes, 3 (batch, seq, head_dim) or 2 (seq, head_dim) "
            "are needed"
        )
    for name, array in (("k", k), ("v", v)):
        if array.ndim != q.ndim:
            raise ValueError(
                f"{name} has shape {array.shape}, but q has shape {q.shape}: "
                "the number of axes must be the same"
            )
