"""`attention_varlen`: sequences of any lengths, one after the other in the same arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike

from cufa.api.forward import AnyPlan, explained, run_in_8_bits_or_on_cpu, run_new
from cufa.api.options import Causal, Precision, UserFunction, Window
from cufa.api.other_names import arguments_of, refuse, refuses_other_names
from cufa.arrays import AnyArray, Array, ArrayT
from cufa.features.dropout import check_dropout, check_dropout_seed
from cufa.features.expression.tracing import NOTHING, trace
from cufa.features.window import NO_WINDOW
from cufa.launch import calls
from cufa.problem.extras import Extras
from cufa.quantized.quantized import Quantized
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cufa.api.keywords import QuantizedVarlenOptions, VarlenOptions


@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    **options: Unpack[VarlenOptions[Literal[False]]],
) -> ArrayT: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    **options: Unpack[VarlenOptions[Literal[True]]],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    **options: Unpack[VarlenOptions[bool]],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@overload
def attention_varlen(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    **options: Unpack[QuantizedVarlenOptions[Literal[False]]],
) -> Any: ...
@overload
def attention_varlen(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    **options: Unpack[QuantizedVarlenOptions[Literal[True]]],
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
    if type(dropout_p) is not float:
        dropout_p = check_dropout(dropout_p)  # an array has no truth
    if dropout_p or seed is not None:
        seed = check_dropout_seed(seed, dropout_p)
    if out_dtype is not None or precision is not None or isinstance(q, np.ndarray):
        return run_in_8_bits_or_on_cpu(locals())
    mods = NOTHING if score_mod is mask_mod is None else trace(score_mod, mask_mod)
    arrays = alibi_slopes, bias, mask, sinks, None  # as `ARRAYS`
    offsets = cu_seqlens_q, cu_seqlens_k, seqused_k
    extras = Extras(arrays, offsets, mods.arrays, seed if dropout_p else None)
    choices = (
        *(return_lse, window, kernel, causal, attention_chunk, softcap, dropout_p, scale),
        *(max_seqlen_q, max_seqlen_k),
    )
    common = "varlen", mods.parts, *map(calls.dtype_of, extras.flat)
    result = calls.run(q, k, v, out, choices, common, extras)
    return run_new(locals(), choices, common, extras, mods) if result is None else result


@arguments_of(attention_varlen)
def explain_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    **options: Unpack[VarlenOptions[bool]],
) -> AnyPlan:
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
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return explained({"q": q, "k": k, "v": v, **lengths, **options})
