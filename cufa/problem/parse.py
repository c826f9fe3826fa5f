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
from cufa.problem.extras import arrays_of, parse_score_arrays
from cufa.problem.lengths import check_integers, check_lengths
from cufa.problem.problem import Problem, from_shapes


def parse(
    arguments: Mapping[str, Any],
    xp: ModuleType,
    functions: TracedFunctions = NOTHING,
    shown: tuple[Ints, ...] | None = None,
) -> tuple[Problem, Operands]:
    """Check the arguments of a call and bring the arrays to 4-D. Nothing is written or copied.

    Parameters
    ----------
    arguments : mapping
        The arguments of `attention` by name; q, k and v are there. A `block_mask` and functions are
        not looked at.
    xp : module
        The result of `array_module` for these arrays.
    functions : TracedFunctions
        Its `score_mod` and `mask_mod`, traced.
    shown : tuple of tuple of int, optional
        Shapes of q, k and v that errors quote, if the caller's arrays have others.

    Returns
    -------
    Problem
    Operands
        (batch, heads, seq, head_dim) views of the arrays.

    Raises
    ------
    TypeError
        For dtypes that are not supported or not the same, and arguments of the wrong type.
    ValueError
        For shapes, layout, scale and devices that do not fit, and an unusable `out`.
    """
    q, k, v = (arguments[name] for name in "qkv")
    out, layout = arguments.get("out"), arguments.get("layout", "bhsd")
    check_layout(layout)
    if xp is np:  # subclasses (memmap, matrix) become the plain arrays that they are views of
        q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
        out = None if out is None else np.asarray(out)
    inputs: dict[str, Array] = {"q": q, "k": k, "v": v}
    arrays = inputs if out is None else {**inputs, "out": out}
    dtype = check_dtypes(arrays)
    _check_ranks(q, k, v)
    if xp is not np:
        check_devices(arrays, xp)
    operands = Operands(as_bhsd(q, layout), as_bhsd(k, layout), as_bhsd(v, layout), None)
    problem = from_shapes(
        dtype,
        operands.q.shape,
        operands.k.shape,
        operands.v.shape,
        scale=arguments.get("scale"),
        asked=values_of(arguments),
        shown=shown or (q.shape, k.shape, v.shape),
    )
    score_arrays = arrays_of(arguments)
    reads, views = parse_score_arrays(score_arrays, functions, q.ndim, problem.sizes, xp)
    problem = problem.reading(*reads)._replace(returns_lse=bool(arguments.get("return_lse")))
    operands = operands._replace(score_arrays=views)
    inputs |= {name: array for name, array in score_arrays.items() if array is not None}
    inputs |= functions.read
    for name, most in (("lengths_k", problem.seq_kv), ("lengths_q", problem.seq_q)):
        lengths = arguments.get(name)
        if lengths is None:
            continue
        check_integers(name, lengths, (problem.batch,), xp)
        problem = problem._replace(kv="Padded")
        if isinstance(lengths, np.ndarray):
            check_lengths(name, lengths, most)
        if not isinstance(lengths, np.ndarray) or xp is np:  # else its copy is read
            inputs[name] = lengths
    if out is not None:
        check_out(out, restore_shape(problem, q.ndim, layout)[0], inputs)
        operands = operands._replace(out=as_bhsd(out, layout))
    return problem, operands


def restore_shape(
    problem: Problem, ndim: int, layout: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the result and of its LSE, in the rank and layout of the caller's arrays.

    Parameters
    ----------
    problem : Problem
    ndim : int
        Rank of the caller's q: 2, 3 or 4.
    layout : str
        "bhsd" or "bshd"; it matters for rank 4 only, and not for the LSE.

    Returns
    -------
    tuple of int
        Shape of the result: (sq, dv), (b, sq, dv), (b, hq, sq, dv) or (b, sq, hq, dv).
    tuple of int
        Shape of the LSE: (sq,), (b, sq) or (b, hq, sq).
    """
    b, h, s, d = problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v
    if ndim == 2:
        return (s, d), (s,)
    if ndim == 3:
        return (b, s, d), (b, s)
    return ((b, h, s, d) if layout == "bhsd" else (b, s, h, d)), (b, h, s)


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
