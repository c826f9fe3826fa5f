"""`attention_varlen`: sequences of any lengths, one after the other in the same arrays."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike

from cufa import device as devices
from cufa.api import fp8_gpu
from cufa.api.arguments import Call, arguments_of, functions_on_cpu, on_cpu
from cufa.api.fp8 import Rows, as_8_bits
from cufa.api.options import (
    Causal,
    Precision,
    QuantizedVarlenOptions,
    UserFunction,
    VarlenOptions,
    Window,
)
from cufa.api.other_names import refuse, refuses_other_names
from cufa.arrays import AnyArray, Array, ArrayT, array_module, as_bhsd
from cufa.checks import check_devices, check_dtypes, check_flag, check_out, check_size
from cufa.cpu import attention as cpu_attention
from cufa.features import values_of
from cufa.features.dropout import check_dropout, check_dropout_seed
from cufa.features.expression.tracing import NOTHING, TracedFunctions, trace
from cufa.features.window import NO_WINDOW
from cufa.launch import calls
from cufa.launch.clear_rows import clear_rows
from cufa.planner.attention import Planner
from cufa.planner.decode import DecodePlan
from cufa.planner.fp8 import Fp8Plan
from cufa.planner.plan import Plan
from cufa.problem.extras import Extras, arrays_of, parse_score_arrays
from cufa.problem.lengths import check_longest, parse_offsets
from cufa.problem.parse import parse
from cufa.problem.problem import Problem
from cufa.quantized.quantized import Quantized
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ANY = 2**31 - 1
LAYOUT = "bshd"  # of one sequence, (1, total, heads, head_dim)
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> ArrayT: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@overload
def attention_varlen(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    *,
    out_dtype: DTypeLike,
    return_lse: Literal[False] = False,
    **options: Unpack[QuantizedVarlenOptions],
) -> Any: ...
@overload
def attention_varlen(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    *,
    out_dtype: DTypeLike,
    return_lse: Literal[True],
    **options: Unpack[QuantizedVarlenOptions],
) -> tuple[Any, Any]: ...
@refuses_other_names
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Array | None = None,
    causal: Causal = False,
    window: Window = NO_WINDOW,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    sinks: Array | None = None,
    score_mod: UserFunction | None = None,
    mask_mod: UserFunction | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    scale: float | None = None,
    out: Array | None = None,
    return_lse: bool = False,
    out_dtype: DTypeLike | None = None,
    precision: Precision | None = None,
    kernel: str | Variant | None = None,
    **other_names: Any,
) -> Any:
    """Compute attention of packed sequences: of any lengths, one after another, without padding.

    Each sequence is computed as by `cufa.attention`; nothing of one reaches another. Lengths are
    read on the device, so a replay of a captured call reads them again.

    Parameters
    ----------
    q : array, shape (total_q, hq, d)
        Queries of all sequences: float16, bfloat16 or float32.
    k : array, shape (total_k, hk, d)
        Keys, of q's dtype. hq must be a multiple of hk.
    v : array, shape (total_k, hk, dv)
        Values, of q's dtype.
    cu_seqlens_q, cu_seqlens_k : array, shape (sequences + 1,), of integers
        Sequence i has the rows from cu_seqlens[i] to cu_seqlens[i + 1] - 1. The first number is 0,
        no number is less than the one before it, and none is more than there are rows. In a NumPy
        array, the last number of `cu_seqlens_q` must be the number of queries. A CuPy array that is
        not contiguous int32 is converted first, and its values are not checked: wrong values give
        meaningless results, but no access outside of the arrays. There may be no sequences.
    max_seqlen_q, max_seqlen_k : int, optional
        Queries and keys of the longest sequence, or more; needed with `bias` and `mask` only. If a
        sequence in CuPy offsets is longer, only its first queries and keys count.
    seqused_k : array, shape (sequences,), of integers, optional
        The number of keys in use of each sequence, from its first one: no more than it has. In a
        CuPy array, a larger number counts as all of its keys.
    causal, window, attention_chunk, softcap, scale
        As in `cufa.attention`, for each sequence by its own lengths.
    alibi_slopes : array, shape (hq,) or (sequences, hq), float32
    bias, mask : array, broadcastable to (sequences, hq, max_seqlen_q, max_seqlen_k)
    sinks : array, shape (hq,), float32
    score_mod, mask_mod : function or str
        `b` is the index of the sequence; `q_idx` and `kv_idx` count from its first query and key.
        There is no `block_mask`, but `cufa.attention` takes one: for example, for documents in one
        sequence.
    dropout_p, seed
        As in `cufa.attention`.
    out : array, optional
        Where the result goes.
    return_lse : bool
        Whether to return the log-sum-exp of the scores, too; with a softcap as in `attention`.
    out_dtype, precision
        As in `cufa.attention`. A `cufa.Quantized` must be made with ``layout="thd"``, and on a GPU
        also with `cu_seqlens` of the same values as `cu_seqlens_q` or `cu_seqlens_k`. On a GPU the
        values are not compared: other values give meaningless results.
    kernel : str or Variant, optional
        Forces a kernel ("fa3_wgmma", "fa2_mma", "fa2_fp32"; in 8 bits "fp8_wgmma") or one
        instantiation; GPU only.

    Returns
    -------
    out : array, shape (total_q, hq, dv)
        In q's dtype. Rows that see no key are 0, and so are queries that no sequence has. In an
        `out` that is given, the latter do not change.
    lse : array, shape (hq, total_q), float32
        With `return_lse`: natural logarithm; -inf for rows that see no key, and for queries that no
        sequence has.

    Raises
    ------
    TypeError, ValueError
        As `cufa.attention`; and for offsets of wrong shapes or dtypes, or in NumPy arrays with
        wrong values.
    CompileError
        NVRTC refused a kernel.

    Notes
    -----
    The method is that of `cufa.attention`. Variants are chosen as if all sequences had the
    average length. CuPy offsets may leave out queries, so a small second kernel looks for these,
    unless `out` is given and `return_lse` is False.

    Examples
    --------
    Sequences of 7, 120 and 33 tokens:

    >>> import numpy as np, cufa
    >>> q = k = v = np.ones((160, 8, 64), np.float32)
    >>> offsets = np.array([0, 7, 127, 160], np.int32)
    >>> cufa.attention_varlen(q, k, v, offsets, offsets, causal=True).shape
    (160, 8, 64)
    """
    if other_names:
        refuse(attention_varlen, other_names)
    tensors = q, k, v, out
    known = all(array is None or getattr(array, "ndim", 0) == 3 for array in tensors)
    mods = NOTHING
    if not (score_mod is mask_mod is None) and not isinstance(q, np.ndarray):
        mods = trace(score_mod, mask_mod)
    if type(dropout_p) is not float:
        dropout_p = check_dropout(dropout_p)  # an array has no truth
    seed = check_dropout_seed(seed, dropout_p)
    arrays = alibi_slopes, bias, mask, sinks, None  # as `ARRAYS`
    offsets = cu_seqlens_q, cu_seqlens_k, seqused_k
    extras = Extras(arrays, offsets, mods.arrays, seed if dropout_p else None)
    if known and q is not None:
        q1, k1, v1, out1 = (None if array is None else array[None] for array in tensors)
        choices = (
            *(causal, window, attention_chunk, softcap, dropout_p, scale),
            *(max_seqlen_q, max_seqlen_k, return_lse, out_dtype, precision, kernel),
        )
        read = "varlen", mods.parts, *map(calls.dtype_of, extras.flat)
        options = calls.key_of(choices, window, kernel), read
        result = calls.replay(q1, k1, v1, out1, return_lse, options, extras)
        if result is not None:
            result = _without_batch(result, out, return_lse)
            return _cleared(result, out, return_lse, cu_seqlens_q, max_seqlen_q)
    arguments = locals()
    check_flag("return_lse", return_lse)
    fp8, arguments = as_8_bits(arguments, "thd")
    xp = _module_of(arguments)
    call = call_of(arguments, mods, xp)
    problem, lengths = call.problem, call.lengths
    if xp is np:
        if fp8 is not None:
            call = fp8.applied(call, Rows.varlen(**lengths))
        return on_cpu(call, arguments)
    if fp8 is not None:
        fp8_gpu.planned(fp8, problem, kernel)
    if problem.sequences == 0:
        if fp8 is None:
            Planner(problem, devices.current(), kernel)  # which refuses a kernel that cannot be
        return _of_no_sequence(problem, arguments, xp)
    extras = extras._replace(lengths=tuple(map(calls.on_device, LENGTHS, lengths.values())))
    if fp8 is None:
        result = calls.run(q1, k1, v1, out1, return_lse, options, extras, problem, LAYOUT, kernel)
    else:
        rows = Rows.varlen(*extras.lengths)
        into = None if out is None else out[None]
        result = fp8_gpu.attention(fp8, rows, problem, into, return_lse, LAYOUT, kernel, extras)
    result = _without_batch(result, out, return_lse)
    if isinstance(cu_seqlens_q, np.ndarray):  # which is known to cover all queries
        return result
    return _cleared(result, out, return_lse, extras.lengths[0], max_seqlen_q)


@arguments_of(attention_varlen)
def explain_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    return_lse: bool = False,
    **options: Unpack[VarlenOptions],
) -> Plan | DecodePlan | Fp8Plan | cpu_attention.Plan:
    """Return how `attention_varlen` would run this call; nothing is compiled, launched or written.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, causal, window
        As for `attention_varlen`.
    attention_chunk, softcap, alibi_slopes, bias, mask, sinks, score_mod, mask_mod, dropout_p, seed
        As for `attention_varlen`.
    scale, out, return_lse, out_dtype, precision, kernel
        As for `attention_varlen`.

    Returns
    -------
    cufa.planner.plan.Plan, cufa.planner.fp8.Fp8Plan or cufa.cpu.attention.Plan
        As in `cufa.explain`. `expected_us`, and the tiles of a plan for NumPy arrays, are as
        if all sequences had the average length.

    Raises
    ------
    TypeError, ValueError
        As `attention_varlen`.
    """
    arguments = {**locals(), **options}
    check_flag("return_lse", return_lse)
    fp8, arguments = as_8_bits(arguments, "thd")
    is_on_host = isinstance(arguments["q"], np.ndarray)
    mods = NOTHING if is_on_host else trace(options["score_mod"], options["mask_mod"])
    xp = _module_of(arguments)
    problem = call_of(arguments, mods, xp).problem
    if xp is np:
        functions_on_cpu(options)
        return cpu_attention.plan(problem.alike)
    if fp8 is not None:
        return fp8_gpu.planned(fp8, problem, options["kernel"])
    device = devices.current()
    return Planner(problem, device, options["kernel"]).explained(problem)


def _module_of(arguments: Mapping[str, Any]) -> ModuleType:
    return array_module(*(arguments[name] for name in ("q", "k", "v", "out")))


def call_of(arguments: Mapping[str, Any], mods: TracedFunctions, xp: ModuleType) -> Call:
    """Check a call's arguments. Lengths that are on the host become int32.

    Parameters
    ----------
    arguments : mapping
        The arguments of `attention_varlen`, by name.
    mods : TracedFunctions
        The caller's functions, traced.
    xp : module
        The module that the arrays belong to.
    """
    arrays = {name: arguments[name] for name in ("q", "k", "v", "out")}
    for name, array in arrays.items():
        if array is not None and array.ndim != 3:
            raise ValueError(f"{name} has shape {array.shape}: (total, heads, head_dim) is needed")
    q, k, v, out = arrays.values()
    whole = {"q": q[None], "k": k[None], "v": v[None], "layout": LAYOUT, **values_of(arguments)}
    whole |= {name: arguments[name] for name in ("scale", "return_lse")}
    problem, operands = parse(whole, xp, shown=(q.shape, k.shape, v.shape))
    operands = operands._replace(seed=check_dropout_seed(arguments["seed"], arguments["dropout_p"]))
    totals = {"cu_seqlens_q": problem.seq_q, "cu_seqlens_k": problem.seq_kv}
    sequences, lengths = parse_offsets({name: arguments[name] for name in LENGTHS}, totals, xp)
    of_score = arrays_of(arguments)
    if out is not None:
        out = np.asarray(out) if xp is np else out
        check_dtypes({"q": q, "out": out})
        if xp is not np:
            check_devices({"out": out}, xp)
        read = {**of_score, **lengths, **mods.read}
        inputs = {name: array for name, array in read.items() if array is not None}
        check_out(out, (*q.shape[:2], v.shape[2]), {"q": q, "k": k, "v": v, **inputs})
        operands = operands._replace(out=_of_one(out))
    longest_q, longest_k = (
        _longest(name, arguments[name]) for name in ("max_seqlen_q", "max_seqlen_k")
    )
    problem = problem._replace(
        kv="Varlen", sequences=sequences, max_seqlen_q=longest_q, max_seqlen_k=longest_k
    )
    check_longest("max_seqlen_q", longest_q, lengths["cu_seqlens_q"])
    check_longest("max_seqlen_k", longest_k, lengths["cu_seqlens_k"], lengths["seqused_k"])
    for name in ("bias", "mask"):
        if of_score[name] is not None and _ANY in (longest_q, longest_k):
            raise ValueError(f"{name}: max_seqlen_q and max_seqlen_k are needed with it")
    reads, views = parse_score_arrays(of_score, mods, 4, problem.sizes, xp)
    shapes = (*q.shape[:2], v.shape[2]), (problem.heads_q, problem.seq_q)
    operands = operands._replace(score_arrays=views)
    return Call(problem.reading(*reads), operands, lengths, shapes, _of_one, ndim=4)


def _of_one(array: Array) -> Array:
    """View (total, heads, head_dim) as one sequence, (1, heads, total, head_dim)."""
    return as_bhsd(array[None], LAYOUT)


def _longest(name: str, most: int | None) -> int:
    return _ANY if most is None else check_size(name, most, least=0)


def _without_batch(result: Any, out: Array | None, return_lse: bool) -> Any:
    """Return what the caller wants of a result of one sequence."""
    if not return_lse:
        return result[0] if out is None else out
    return (result[0][0] if out is None else out), result[1][0]


def _of_no_sequence(problem: Problem, arguments: Mapping[str, Any], xp: Any) -> Any:
    """Return the result of a call on the GPU whose queries no sequence has."""
    q, out = arguments["q"], arguments["out"]
    if out is None:
        out = xp.zeros((*q.shape[:2], problem.head_dim_v), q.dtype)
    if not arguments["return_lse"]:
        return out
    lse = xp.empty((problem.heads_q, problem.seq_q), np.float32)
    lse.fill(-np.inf)
    return out, lse


def _cleared(
    result: Any, out: Array | None, return_lse: bool, offsets: Array, longest: int | None
) -> Any:
    """Clear the rows that no sequence has, of arrays that are made here; return the result."""
    made, lse = result if return_lse else (result, None)
    most = _ANY if longest is None else int(longest)
    clear_rows(made if out is None else None, lse, offsets, most)
    return result
