"""`attention` and `explain`: problem -> plan -> kernel -> launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike

from cufa import device as devices
from cufa.api import fp8_gpu
from cufa.api.arguments import arguments_of, functions_on_cpu, parsed
from cufa.api.block_mask import BlockMask, mask_mod_of
from cufa.api.fp8 import Rows, as_8_bits
from cufa.api.options import (
    AttentionOptions,
    Causal,
    Layout,
    Precision,
    QuantizedOptions,
    UserFunction,
    Window,
)
from cufa.api.other_names import refuse, refuses_other_names
from cufa.arrays import AnyArray, Array, ArrayT, Operands, array_module, as_bhsd
from cufa.checks import check_flag
from cufa.cpu import attention as cpu
from cufa.cpu.lengths import attention_of_lengths
from cufa.features.dropout import check_dropout, check_dropout_seed
from cufa.features.expression.tracing import NOTHING, TracedFunctions, trace
from cufa.features.window import NO_WINDOW
from cufa.launch import calls
from cufa.planner.attention import Planner
from cufa.planner.decode import DecodePlan
from cufa.planner.fp8 import Fp8Plan
from cufa.planner.plan import Plan
from cufa.problem.extras import NO_EXTRAS, Extras
from cufa.problem.parse import restore_shape
from cufa.problem.problem import Problem
from cufa.quantized.quantized import Quantized
from cufa.specs.variant import Variant
from cufa.tuned import user_table

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    *,
    out_dtype: DTypeLike,
    return_lse: Literal[False] = False,
    **options: Unpack[QuantizedOptions],
) -> Any: ...
@overload
def attention(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    *,
    out_dtype: DTypeLike,
    return_lse: Literal[True],
    **options: Unpack[QuantizedOptions],
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
        Queries: float16, bfloat16 (`ml_dtypes.bfloat16`) or float32. 3-D (b, s, d) and 2-D (s, d)
        arrays stand for missing axes of length 1: (tokens, heads, d) is for `attention_varlen`, and
        (b, tokens, heads, d) needs ``layout="bshd"``. Any strides; on the GPU an array is copied
        first if its last axis is not contiguous or its rows are not aligned to 16 bytes.
    k : array, shape (b, hk, sk, d)
        Keys, of q's dtype. hq must be a multiple of hk: query head i uses head i // (hq / hk).
    v : array, shape (b, hk, sk, dv)
        Values, of q's dtype. d and dv are 1 to 256 and may differ. Instead of arrays, q, k and v
        may all be `cufa.Quantized`, with `out_dtype`: see ``docs/guide/fp8.md``.
    causal : bool or {"bottom-right", "top-left"}
        Query i sees the keys j <= i + sk - sq only (aligned bottom-right: True, too), or those of
        j <= i (top-left).
    window : tuple of int or None, (left, right)
        Query i sees the keys from i + sk - sq - left to i + sk - sq + right only. Bounds are 0 or
        more; None is no bound (flash-attn's -1).
        With a causal mask, it sees the keys that both allow. Tiles of keys that no query sees take
        no time.
    attention_chunk : int, optional
        Query i stands at position p = i + sk - sq and sees the keys j of its own chunk only:
        j // attention_chunk == p // attention_chunk. Division rounds down, so a query before the
        first key sees none. With a causal mask it is the chunked attention of Llama 4. Tiles of
        keys of other chunks take no time.
    softcap : float, optional
        c * tanh(score / c) takes the place of the score (Gemma 2): 1e-6 to 1e4. On a GPU, in
        bfloat16, to 2^-11 of it, a quarter of what a score rounded to bfloat16 may err; with
        `return_lse`, as in float16, to 2^-20 of it or 2^-22 of c, which takes longer.
    alibi_slopes : array, shape (hq,) or (b, hq), float32
        ``-slope * |i + sk - sq - j|`` is added to the score of query i and key j, after the softcap
        (ALiBi, Press et al. 2022).
    bias : array, broadcastable to (b, hq, sq, sk)
        Added to the scores after ALiBi: float16, bfloat16 or float32. It and `mask` have the axes
        (b, sq, sk) with 3-D arrays, and (sq, sk) with 2-D ones, whatever the layout; or all four
        axes, with length 1 for those that q lacks.
    mask : array of bool, broadcastable to (b, hq, sq, sk)
        True where a query sees a key, unless another mask hides it. Or uint8, eight keys a byte as
        `numpy.packbits` packs the last axis, which then is not broadcast; of an element a key,
        use ``mask.astype(bool)``. In NumPy arrays, bits beyond the last key are an error; on the
        GPU they are not looked at. A padding mask (b, keys) is ``mask[:, None, None]``: alone, it
        would be taken for (sq, sk).
    sinks : array, shape (hq,), float32
        A logit of each head that takes part in the softmax and has no value (gpt-oss).
    score_mod : function or str, optional
        (score, b, h, q_idx, kv_idx) -> score, with FlexAttention's signature: called with the score
        after the scale, the softcap, ALiBi and the bias. Written with operators, NumPy's functions
        and elements of arrays to which names of the function refer; see the notes.
    mask_mod : function or str, optional
        (b, h, q_idx, kv_idx) -> bool, likewise: True where a query sees a key, unless another mask
        hides it.
    block_mask : BlockMask, optional
        Tiles of queries and keys that its `mask_mod` hides are not computed, and in tiles that are
        whole the function is not called. The mask's function need not be given again, and another
        one may not. Other masks and lengths may be given, too.
    lengths_k : array, shape (b,), of integers
        How many keys each sequence has, 0 to sk. Keys behind them do not count, and masks and
        ALiBi's distances are aligned to the last key that counts. The array is on the host or on
        the device, where nothing is read back; there it is converted first unless it is
        contiguous int32. Beyond sk, lengths on the device count as sk.
    lengths_q : array, shape (b,), of integers
        How many queries each sequence has, 0 to sq, likewise; with or without `lengths_k`. Query i
        of sequence n then stands at key i + lengths_k[n] - lengths_q[n], in place of i + sk - sq.
        Rows behind them are 0, and -inf in the log-sum-exp; what q holds there does not matter.
        A batch that is padded on the right, of as many queries as keys, takes one array for both.
    dropout_p : float
        The share of the weights that is dropped at random; the others are divided by 1 - dropout_p
        (Dao et al. 2022, algorithm 2). 0 or more, and less than 1. `cufa.dropout_mask` says which
        weights are kept.
    seed : int, optional
        Needed for a dropout, 0 to 2^64 - 1. The same seed drops the same weights, whatever runs:
        give each layer and step a seed of its own.
    scale : float, optional
        Factor of the scores, less than 2^64 in magnitude; 1 / sqrt(d) by default.
    layout : {"bhsd", "bshd"}
        Order of the axes of 4-D arrays, q, k, v and out alike.
    out : array, optional
        Where the result goes: of its shape and dtype, sharing no memory with the inputs.
    return_lse : bool
        Whether to return the log-sum-exp of the scores, too. On a GPU, with a softcap in
        bfloat16, the result then has other bits.
    batch_invariant : bool
        Whether a sequence gives the same bits alone and in any batch: the variant, and the number
        of parts that keys are cut into, are then those of a batch of one. Few queries with many
        keys need memory for the parts' results then, at most about as much as k and v take. A
        dropout and a function of `b` still depend on the sequence's place in the batch.
    out_dtype : dtype, optional
        Dtype of the result in 8 bits: float16, bfloat16, or on NumPy arrays float32. Needed where
        q, k and v are `cufa.Quantized`; with `precision` the dtype of q by default.
    precision : {"fp8"}, optional
        Quantises q, k and v to 8 bits first, as `cufa.quantize` does by default, but q and k with
        ``hadamard=True``. CuPy arrays need a Hopper GPU; ``docs/guide/fp8.md`` says what its kernel
        takes.
    kernel : str or Variant, optional
        Forces a kernel ("fa3_wgmma", "fa2_mma", "fa2_fp32", "fa1_fp32"; in 8 bits "fp8_wgmma") or
        one instantiation, which caps scores as its name says; GPU only.

    Returns
    -------
    out : array, shape (b, hq, sq, dv) or as `layout` and rank say
        In q's dtype; sums are float32. Rows that see no key are 0, and so are those behind
        `lengths_q`.
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

    ``docs/guide/numerics.md`` says where infinities and NaN go, and how large scores may be;
    ``docs/guide/masks-and-functions.md`` says how `score_mod` and `mask_mod` are traced. A function
    must not branch on its arguments: `numpy.where`, `numpy.minimum` and `&` take the place of `if`,
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
    if block_mask is not None:
        mask_mod = mask_mod_of(block_mask, mask_mod)
    mods = NOTHING
    if not (score_mod is mask_mod is None) and not isinstance(q, np.ndarray):
        mods = trace(score_mod, mask_mod)
    if type(dropout_p) is not float:
        dropout_p = check_dropout(dropout_p)  # an array has no truth
    seed = check_dropout_seed(seed, dropout_p)
    extras = NO_EXTRAS
    read: tuple[Any, ...] = ()
    no_arrays = (
        alibi_slopes is bias is mask is sinks is block_mask is lengths_k is lengths_q is None
    )
    if dropout_p or mods.parts or not no_arrays:
        lengths = () if lengths_k is lengths_q is None else (lengths_k, lengths_q)
        arrays = alibi_slopes, bias, mask, sinks, block_mask  # as `ARRAYS`
        extras = Extras(arrays, lengths, mods.arrays, seed if dropout_p else None)
        has_tiles = block_mask is not None and block_mask.seq_kv > 0
        read = mods.parts, len(lengths), has_tiles, *map(calls.dtype_of, extras.flat)
    choices = (
        *(causal, window, attention_chunk, softcap, dropout_p, scale, layout),
        *(return_lse, batch_invariant, out_dtype, precision, kernel),
    )
    options = calls.key_of(choices, window, kernel), read
    result = calls.replay(q, k, v, out, return_lse, options, extras)
    if result is not None:
        return result
    fp8, arguments = as_8_bits(locals(), layout)
    problem, operands, xp = _parsed(arguments, mods)
    operands = operands._replace(seed=seed)
    if xp is np:
        if fp8 is not None:
            rows = Rows.padded(lengths_k, lengths_q)
            problem, operands = fp8.applied(problem, operands, rows)
        return _on_cpu(problem, operands, arguments)
    if extras.lengths:
        on_device = map(calls.on_device, ("lengths_k", "lengths_q"), extras.lengths)
        extras = extras._replace(lengths=tuple(on_device))
    if fp8 is not None:
        rows = Rows.padded(*extras.lengths)
        return fp8_gpu.attention(fp8, rows, problem, out, return_lse, layout, kernel, extras)
    return calls.run(
        *(q, k, v, out, return_lse, options, extras, problem, layout, kernel),
        batch_invariant=batch_invariant,
    )


@arguments_of(attention)
def explain(
    q: Array, k: Array, v: Array, *, return_lse: bool = False, **options: Unpack[AttentionOptions]
) -> Plan | DecodePlan | Fp8Plan | cpu.Plan:
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
        The last one for NumPy arrays. `str` of any is one line. The first two say in `expected_us`
        what this variant and those that it was chosen from would take on an H200, where known.

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
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "return_lse": return_lse, **options}
    if options["block_mask"] is not None:
        arguments["mask_mod"] = mask_mod_of(options["block_mask"], options["mask_mod"])
    fp8, arguments = as_8_bits(arguments, options["layout"])
    problem, _, xp = _parsed(arguments)
    check_dropout_seed(options["seed"], options["dropout_p"])
    if xp is np:
        functions_on_cpu(arguments)
        return cpu.plan(problem)
    if fp8 is not None:
        return fp8_gpu.planned(fp8, problem, options["kernel"])
    device = devices.current()
    kernel, invariant = options["kernel"], options["batch_invariant"]
    return Planner(problem, device, kernel, user_table(device), invariant).explained(problem)


def _parsed(
    arguments: Mapping[str, Any], mods: TracedFunctions | None = None
) -> tuple[Problem, Operands, Any]:
    """Check the arguments of a call, by name; return also the module that its arrays belong to.

    `mods` are the functions if they have been traced.
    """
    check_flag("return_lse", arguments["return_lse"])
    check_flag("batch_invariant", arguments["batch_invariant"])
    xp = array_module(*(arguments[name] for name in ("q", "k", "v", "out")))
    if mods is None:
        mods = NOTHING if xp is np else trace(arguments["score_mod"], arguments["mask_mod"])
    return *parsed(arguments, mods, xp), xp


def _on_cpu(problem: Problem, operands: Operands, arguments: Mapping[str, Any]) -> Any:
    functions, q, out = functions_on_cpu(arguments), arguments["q"], arguments["out"]
    shape, lse_shape = restore_shape(problem, np.ndim(q), arguments["layout"])
    if out is None:
        out = np.empty(shape, q.dtype)
        operands = operands._replace(out=as_bhsd(out, arguments["layout"]))
    else:
        functions.check_apart("out", out)
    result = operands.out
    if functions.is_called:  # whatever they raise, `out` is whole
        operands = operands._replace(out=np.empty(result.shape, result.dtype))
    if problem.kv == "Padded":
        lse = attention_of_lengths(problem, operands, arguments, functions)
    else:
        _, lse = cpu.attention(problem, operands, functions)
    if result is not operands.out:
        result[...] = operands.out
    return (out, lse.reshape(lse_shape)) if arguments["return_lse"] else out
