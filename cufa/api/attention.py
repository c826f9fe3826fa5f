"""`attention` and `explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike

from cufa.api.block_mask import BlockMask, mask_mod_of
from cufa.api.forward import AnyPlan, explained, run_in_8_bits_or_on_cpu, run_new
from cufa.api.options import Causal, Layout, Precision, UserFunction, Window
from cufa.api.other_names import arguments_of, refuse, refuses_other_names
from cufa.arrays import AnyArray, Array, ArrayT
from cufa.features.dropout import check_dropout, check_dropout_seed
from cufa.features.expression.tracing import NOTHING, trace
from cufa.features.window import NO_WINDOW
from cufa.launch import calls
from cufa.problem.extras import NO_EXTRAS, Extras
from cufa.quantized.quantized import Quantized
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cufa.api.keywords import AttentionOptions, QuantizedOptions


@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, **options: Unpack[AttentionOptions[Literal[False]]]
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, **options: Unpack[AttentionOptions[Literal[True]]]
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, **options: Unpack[AttentionOptions[bool]]
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: Quantized, k: Quantized, v: Quantized, **options: Unpack[QuantizedOptions[Literal[False]]]
) -> Any: ...
@overload
def attention(
    q: Quantized, k: Quantized, v: Quantized, **options: Unpack[QuantizedOptions[Literal[True]]]
) -> tuple[Any, Any]: ...
@refuses_other_names
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
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
    block_mask: BlockMask | None = None,
    lengths_k: Array | None = None,
    lengths_q: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
    out: Array | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    out_dtype: DTypeLike | None = None,
    precision: Precision | None = None,
    kernel: str | Variant | None = None,
    **other_names: Any,
) -> Any:
    """Compute exact attention, softmax(scale * Q K^T) V, without storing the scores.

    CuPy arrays are computed on the current device and stream, without a synchronisation; NumPy
    arrays on the CPU.

    Parameters
    ----------
    q : array, shape (b, hq, sq, d)
        Queries: float16, bfloat16 (`ml_dtypes.bfloat16`) or float32. In 3-D (b, s, d) and 2-D
        (s, d) arrays the missing axes have length 1. (b, tokens, heads, d) needs
        ``layout="bshd"``, and (tokens, heads, d) is for `attention_varlen`. Any strides; on a GPU
        an array is copied first if its last axis is not contiguous or its rows are not aligned to
        16 bytes.
    k : array, shape (b, hk, sk, d)
        Keys, of q's dtype. hq must be a multiple of hk: query head i uses head i // (hq / hk).
    v : array, shape (b, hk, sk, dv)
        Values, of q's dtype. d and dv are 1 to 256 and may differ. Instead of arrays, q, k and v
        may all be `cufa.Quantized`, with `out_dtype`: see ``docs/guide/fp8.md``.
    causal : bool or {"bottom-right", "top-left"}
        With True or "bottom-right", query i sees the keys j <= i + sk - sq. With "top-left", it
        sees the keys j <= i.
    window : tuple of int or None, (left, right)
        Query i sees the keys from i + sk - sq - left to i + sk - sq + right only. Bounds are 0 or
        more; None is no bound (flash-attn's -1). With a causal mask, it sees the keys that both
        allow. Tiles of keys that no query sees take no time.
    attention_chunk : int, optional
        Query i has the position p = i + sk - sq and sees the keys j of its chunk only:
        j // attention_chunk == p // attention_chunk. Division rounds down, so a query before the
        first key sees none. With a causal mask it is the chunked attention of Llama 4. Tiles of
        keys of other chunks take no time.
    softcap : float, optional
        c, 1e-6 to 1e4: c * tanh(score / c) replaces the score (Gemma 2). On a GPU in bfloat16 the
        relative error is 2^-11, a quarter of that of rounding to bfloat16. With `return_lse`, and
        in float16, it is 2^-20 of the score or 2^-22 of c, which takes longer.
    alibi_slopes : array, shape (hq,) or (b, hq), float32
        ``-slope * |i + sk - sq - j|`` is added to the score of query i and key j, after the softcap
        (ALiBi, Press et al. 2022).
    bias : array, broadcastable to (b, hq, sq, sk)
        Added to the scores after ALiBi: float16, bfloat16 or float32. The axes of `bias` and `mask`
        do not depend on `layout`. With 3-D q they are (b, sq, sk), with 2-D q (sq, sk); or all four
        axes, with length 1 for those that q lacks.
    mask : array of bool, broadcastable to (b, hq, sq, sk)
        True where a query sees a key, unless another mask hides it. Or uint8 with eight keys in
        each byte, as `numpy.packbits` packs the last axis, which then is not broadcast. If a uint8
        mask has one element for each key, use ``mask.astype(bool)``. Bits beyond the last key are
        an error in NumPy arrays, and are ignored on a GPU. Give a padding mask (b, keys) as
        ``mask[:, None, None]``: otherwise it would be broadcast as (sq, sk).
    sinks : array, shape (hq,), float32
        A logit for each head that is added to the softmax, and has no value (gpt-oss).
    score_mod : function or str, optional
        (score, b, h, q_idx, kv_idx) -> score, with FlexAttention's signature: called with the score
        after the scale, the softcap, ALiBi and the bias. It may use operators, NumPy's functions,
        and elements of arrays that it refers to by names; see the notes.
    mask_mod : function or str, optional
        (b, h, q_idx, kv_idx) -> bool, likewise: True where a query sees a key, unless another mask
        hides it.
    block_mask : BlockMask, optional
        Tiles of queries and keys that its `mask_mod` hides are not computed, and in tiles that it
        does not hide at all the function is not evaluated. `mask_mod` may be left out, and must not
        be another function. Other masks and lengths may be given, too.
    lengths_k : array, shape (b,), of integers
        The number of keys of each sequence, 0 to sk. Keys beyond it do not count, and masks and
        ALiBi's distances are aligned to the last key that counts. A NumPy or CuPy array; a CuPy
        array is not read back, is converted first unless it is contiguous int32, and lengths in it
        that are more than sk count as sk.
    lengths_q : array, shape (b,), of integers
        The number of queries of each sequence, 0 to sq, in the same way; with or without
        `lengths_k`. Query i of sequence n then has the position
        i + lengths_k[n] - lengths_q[n], instead of i + sk - sq. Rows beyond it are 0, and -inf in
        the log-sum-exp; values of q there do not matter. If q and k are padded on the right in the
        same way, give the same array for both.
    dropout_p : float
        The share of the weights that is dropped at random; the others are divided by 1 - dropout_p
        (Dao et al. 2022, algorithm 2). 0 or more, and less than 1. `cufa.dropout_mask` says which
        weights are kept.
    seed : int, optional
        Needed for a dropout, 0 to 2^64 - 1. The same seed drops the same weights in every kernel:
        give each layer and step another seed.
    scale : float, optional
        Factor of the scores, less than 2^64 in magnitude; 1 / sqrt(d) by default.
    layout : {"bhsd", "bshd"}
        Order of the axes of 4-D arrays, q, k, v and out alike.
    out : array, optional
        Where the result goes: of its shape and dtype, sharing no memory with the inputs.
    return_lse : bool
        Whether to return the log-sum-exp of the scores, too; `attention_backward` needs it. On a
        GPU, with a softcap in bfloat16, the result then has other bits.
    batch_invariant : bool
        Whether a sequence gives the same bits alone and in any batch: the variant, and the number
        of splits of the keys, are then those of a batch of one. Few queries with many keys then
        need memory for the results of splits, at most about as much as k and v take. A dropout and
        a function of `b` still depend on the index of the sequence in the batch.
    out_dtype : dtype, optional
        Dtype of the result of a call in 8 bits: float16, bfloat16, or on NumPy arrays float32.
        Needed if q, k and v are `cufa.Quantized`; with `precision`, the dtype of q by default.
    precision : {"fp8"}, optional
        Quantizes q, k and v to 8 bits first, as `cufa.quantize` does by default, but q and k with
        ``hadamard=True``. CuPy arrays need a Hopper GPU; ``docs/guide/fp8.md`` lists what runs
        there.
    kernel : str or Variant, optional
        Forces a kernel ("fa3_wgmma", "fa2_mma", "fa2_fp32", "fa1_fp32"; in 8 bits "fp8_wgmma") or
        one variant of it; GPU only. A variant also decides how exact a softcap is.

    Returns
    -------
    out : array, shape (b, hq, sq, dv), in the layout and rank of q
        In q's dtype; sums are float32. Rows that see no key, or are beyond `lengths_q`, are 0.
    lse : array, shape (b, hq, sq), float32
        With `return_lse`: natural logarithm; -inf for rows that see no key. With `sinks` it
        includes the row's sink: log(exp(lse) - exp(sink)) is that of the keys alone.

    Raises
    ------
    TypeError
        Unsupported or mixed dtypes, objects that are no arrays, NumPy mixed with CuPy, arguments
        of the wrong type, functions that cannot be traced.
    ValueError
        Shapes, layout, scale, devices or `out` that do not fit; a negative bound of a window, a
        softcap outside 1e-6 to 1e4; a kernel that cannot take the call.
    CompileError
        NVRTC refused a kernel.
    RuntimeError
        With `batch_invariant` in a capture: no memory is set aside.

    Notes
    -----
    The method is FlashAttention-2 (Dao 2023, algorithm 1); for 16-bit arrays on Hopper it is
    FlashAttention-3 (Shah et al. 2024, algorithm 2). "fa1_fp32" is FlashAttention-1 (Dao et al.
    2022, algorithm 1). Few queries with many keys run as in `cufa.decode`
    where that is faster; ``docs/guide/numerics.md`` says when.

    ``docs/guide/numerics.md`` describes infinities, NaN and large scores, and
    ``docs/guide/masks-and-functions.md`` how `score_mod` and `mask_mod` are traced. A function
    must not branch on its arguments: use `numpy.where`, `numpy.minimum` and `&` instead of `if`,
    `min` and `and`. A string is C++ for the GPU.

    Examples
    --------
    Four query heads share each of two K/V heads:

    >>> import numpy as np, cufa
    >>> q = np.ones((1, 8, 100, 64), np.float32)
    >>> k = v = np.ones((1, 2, 100, 64), np.float32)
    >>> cufa.attention(q, k, v, causal=True, window=(31, 0)).shape
    (1, 8, 100, 64)

    Two sequences of 100 and 37 tokens, padded on the right:

    >>> x, n = np.ones((2, 8, 100, 64), np.float32), np.array([100, 37])
    >>> out = cufa.attention(x, x, x, causal=True, window=(31, 0), lengths_q=n, lengths_k=n)
    >>> float(out[1, 0, 36, 0]), float(out[1, 0, 37, 0])
    (1.0, 0.0)

    A function of the scores:

    >>> def near(score, b, h, q_idx, kv_idx):
    ...     return score - 0.1 * abs(q_idx - kv_idx)
    >>> out, lse = cufa.attention(q, k, v, score_mod=near, return_lse=True)
    >>> lse.shape
    (1, 8, 100)
    """
    if other_names:
        refuse(attention, other_names)
    if type(dropout_p) is not float:
        dropout_p = check_dropout(dropout_p)  # an array has no truth
    if dropout_p or seed is not None:
        seed = check_dropout_seed(seed, dropout_p)
    if out_dtype is not None or precision is not None or isinstance(q, np.ndarray):
        return run_in_8_bits_or_on_cpu(locals())
    if block_mask is not None:
        mask_mod = mask_mod_of(block_mask, mask_mod)
    mods = NOTHING if score_mod is mask_mod is None else trace(score_mod, mask_mod)
    extras = NO_EXTRAS
    common: tuple[Any, ...] = ()
    no_arrays = (
        alibi_slopes is bias is mask is sinks is block_mask is lengths_k is lengths_q is None
    )
    if dropout_p or mods.parts or not no_arrays:
        of_lengths = () if lengths_k is lengths_q is None else (lengths_k, lengths_q)
        arrays = alibi_slopes, bias, mask, sinks, block_mask  # as `ARRAYS`
        extras = Extras(arrays, of_lengths, mods.arrays, seed if dropout_p else None)
        has_tiles = block_mask is not None and block_mask.seq_kv > 0
        common = mods.parts, len(of_lengths), has_tiles, *map(calls.dtype_of, extras.flat)
    choices = (
        *(return_lse, window, kernel, causal, attention_chunk, softcap, dropout_p, scale),
        *(layout, batch_invariant),
    )
    result = calls.run(q, k, v, out, choices, common, extras)
    return run_new(locals(), choices, common, extras, mods) if result is None else result


@arguments_of(attention)
def explain(q: Array, k: Array, v: Array, **options: Unpack[AttentionOptions[bool]]) -> AnyPlan:
    """Return how `attention` would run this call; nothing is compiled, launched or written.

    Parameters
    ----------
    q, k, v, causal, window, attention_chunk, softcap, alibi_slopes, bias, mask, sinks
        As for `attention`.
    score_mod, mask_mod, block_mask, lengths_k, lengths_q, dropout_p, seed, scale, layout, out
        As for `attention`.
    return_lse, batch_invariant, out_dtype, precision, kernel
        As for `attention`.

    Returns
    -------
    cufa.planner.plan.Plan, cufa.planner.decode.DecodePlan, cufa.planner.fp8.Fp8Plan or
    cufa.cpu.attention.Plan
        `str` of each is one line. `expected_us` of the first two has pairs of a variant and the
        microseconds that the planner expects of it on an H200, if known: this variant, and others.
        The last class is for NumPy arrays; `rows` and `keys` are the sizes of a tile.

    Raises
    ------
    TypeError, ValueError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q = k = v = np.ones((1, 8, 100, 64), np.float32)
    >>> plan = cufa.explain(q, k, v, causal=True)
    """
    return explained({"q": q, "k": k, "v": v, **options})
