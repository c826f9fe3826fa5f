"""`decode`: attention of a few new queries over a cache of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cufa.api.forward import run_in_8_bits_or_on_cpu, run_new
from cufa.api.options import Layout, Window
from cufa.api.other_names import refuse, refuses_other_names
from cufa.arrays import AnyArray, Array, ArrayT
from cufa.features.window import NO_WINDOW
from cufa.launch import calls
from cufa.problem.extras import Extras
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cufa.api.keywords import DecodeOptions


_NAMES = (
    *("q", "k_cache", "v_cache", "out"),
    *("return_lse", "window", "kernel", "causal", "attention_chunk", "softcap", "scale"),
    *("layout", "num_splits", "unified_max"),
    *("lengths", "block_table", "k_scale", "v_scale", "alibi_slopes", "sinks"),
)


@overload
def decode(
    q: ArrayT,
    k_cache: AnyArray,
    v_cache: AnyArray,
    **options: Unpack[DecodeOptions[Literal[False]]],
) -> ArrayT: ...
@overload
def decode(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray, **options: Unpack[DecodeOptions[Literal[True]]]
) -> tuple[ArrayT, ArrayT]: ...
@overload
def decode(
    q: ArrayT, k_cache: AnyArray, v_cache: AnyArray, **options: Unpack[DecodeOptions[bool]]
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
@refuses_other_names
def decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    lengths: Array | None = None,
    block_table: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    causal: bool = True,
    window: Window = NO_WINDOW,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
    out: Array | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    unified_max: float | None = None,
    kernel: str | Variant | None = None,
    **other_names: Any,
) -> Any:
    """Compute attention of the newest queries of each sequence over the keys in its cache.

    Unlike in `attention`, sequences may differ in length, and keys and values may be in pages.
    `KVCache` and `PagedKVCache` manage such caches.

    Parameters
    ----------
    q : array, shape (b, hq, sq, d)
        The newest queries of each sequence: float16, bfloat16 (`ml_dtypes.bfloat16`) or float32. d
        and dv are 1 to 256 and may differ. Any strides; on a GPU, q or a whole cache is copied
        first unless its rows are contiguous and multiples of 16 bytes.
    k_cache : array, shape (b, hk, capacity, d) or (pages, hk, page_size, d)
        Keys, of q's dtype, or of 8 bits with a `k_scale`: int8, `ml_dtypes.float8_e4m3fn`, or the
        bytes of the latter as uint8 (CuPy has no 8-bit floating point). In pages of any size if
        there is a `block_table`. hq must be a multiple of hk.
    v_cache : array, shape (b, hk, capacity, dv) or (pages, hk, page_size, dv)
        Values, of q's dtype, or of 8 bits as the keys, with a `v_scale`.
    lengths : array, shape (b,), optional
        Keys in use, including those of the new queries: 0 to the capacity, which is the default.
        Query i of sq is at position lengths - sq + i of its sequence. Integers in a NumPy or CuPy
        array. The kernel reads a contiguous int32 CuPy array in place, also in each replay of a
        captured call; others are converted first. Another stream must not change the array while
        a call that reads it runs.
    block_table : array, shape (b, pages a sequence), optional
        The pages of each sequence, in order: integers, as `lengths`, with contiguous rows.
        Entries beyond the length may be anything. Sequences may share pages. To use some sequences
        of a larger contiguous cache, give a table with one page a sequence.
    k_scale, v_scale : array, shape (b, hk, capacity) or (pages, hk, page_size), float32, optional
        Needed for caches of 8 bits: a key or a value is its 8-bit numbers times its scale. Finite
        or NaN; any strides; axes in the order of `layout`. On a GPU q must have 16 bits, and the
        product of a weight and the scale of V is rounded to float16. A NaN in numbers or scales
        makes the result NaN.
    causal : bool
        Query i sees the keys j <= i + lengths - sq only. If False, it sees all keys in use; for
        example, if the cache is a shared prefix, see `merge`.
    window : tuple of int or None, (left, right)
        Query i sees the keys from i + lengths - sq - left to i + lengths - sq + right only; None is
        no bound. Keys before all windows, and their pages, are not read.
    attention_chunk : int, optional
        As in `attention`, with p = i + lengths - sq. Keys before all chunks, and their pages, are
        not read.
    softcap : float, optional
        As in `attention`.
    alibi_slopes : array, shape (hq,) or (b, hq), float32
        As in `attention`; query i is at position lengths - sq + i.
    sinks : array, shape (hq,), float32
        As in `attention`.
    scale : float, optional
        As in `attention`.
    layout : {"bhsd", "bshd"}
        Order of the axes; "bshd" has q and out (b, sq, hq, d), and caches (b, capacity, hk, d) or
        (pages, page_size, hk, d), as flash-attn and vLLM do.
    out : array, optional
        Where the result goes: of its shape and dtype, sharing no memory with the inputs.
    return_lse : bool
        Whether to return the log-sum-exp of the scores, too; with a softcap as in `attention`.
    num_splits : int, optional
        Into how many parts the keys of each sequence are split, which a GPU computes at the same
        time; by default as many as keep it busy. With a given number, a sequence has the same bits
        alone and in any batch. On the CPU it always has.
    unified_max : float, optional
        A score, in natural units, that replaces all row maxima on a GPU, as in FlashDecoding++. For
        caches in float16 and bfloat16. Results are right whatever it is: keys whose weights leave
        the range of 16 bits are computed again with true maxima. It is fast if the largest scores
        are at most 2 below it, and at most 10 (float16) or 44 (bfloat16) above it.
    kernel : str or Variant, optional
        Forces a kernel ("decode" or "decode_wgmma"; "decode_fp8" or "decode_int8") or one
        instantiation; GPU only.

    Returns
    -------
    out : array, shape (b, hq, sq, dv) or (b, sq, hq, dv)
        In q's dtype; sums are float32. Queries that see no key are 0: all queries of a sequence of
        length 0, and with `causal` the first sq - length queries if length is less than sq.
    lse : array, shape (b, hq, sq), float32
        With `return_lse`: natural logarithm; -inf for queries that see no key. With `sinks` it
        includes the head's sink, as in `attention`.

    Raises
    ------
    TypeError
        Unsupported or mixed dtypes, also of caches of 8 bits; objects that are no arrays, NumPy
        mixed with CuPy but for `lengths` and `block_table`; options of another type.
    ValueError
        Shapes, layout, scale, devices or `out` that do not fit; caches of 8 bits without scales, or
        others with them; a negative bound of a window, a softcap outside 1e-6 to 1e4; `num_splits`
        below 1, a kernel that cannot take the call; in a capture into a CUDA graph, an array that
        would be copied. Lengths out of range in a NumPy array; pages in use that do not exist, if
        both table and lengths are NumPy arrays. Values of CuPy arrays are not checked: lengths out
        of range and pages that do not exist give meaningless results, but no read outside the
        caches.
    RuntimeError
        The call is captured into a CUDA graph, and no call of the same size was made before,
        outside of a graph.
    CompileError
        NVRTC refused a kernel.

    Notes
    -----
    On the GPU: split keys and reduction as in Flash-Decoding (Dao, Haziza, Massa and Sizov 2023);
    the query heads of a KV head as the rows of one product, like the flat ones of FlashDecoding++
    (Hong et al. 2023, section 4), and its unified maximum (section 3) with `unified_max`; pages as
    in PagedAttention (Kwon et al. 2023).

    Nothing beyond a length reaches a result. ``docs/guide/numerics.md`` describes infinities, NaN
    and large scores.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q = np.ones((2, 8, 1, 64), np.float32)
    >>> k_cache = v_cache = np.ones((2, 2, 100, 64), np.float32)
    >>> cufa.decode(q, k_cache, v_cache, lengths=np.array([3, 100])).shape
    (2, 8, 1, 64)

    With keys and values of 8 bits:

    >>> k8, scales = np.ones((2, 2, 100, 64), np.int8), np.full((2, 2, 100), 0.02, np.float32)
    >>> cufa.decode(q, k8, k8, k_scale=scales, v_scale=scales)[0, 0, 0, :2].round(4)
    array([0.02, 0.02], dtype=float32)
    """
    if other_names:
        refuse(decode, other_names)
    choices = (
        *(return_lse, window, kernel, causal, attention_chunk, softcap, scale),
        *(layout, num_splits, unified_max),
    )
    others = lengths, block_table, k_scale, v_scale, alibi_slopes, sinks
    return decode_padded(q, k_cache, v_cache, out, choices, others)


def decode_padded(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    out: Array | None,
    choices: tuple[Any, ...],
    others: tuple[Array | None, ...],
    padded: bool = False,
) -> Any:
    """Decode as `decode`, over caches of which it may be known that kernels can read them.

    Parameters
    ----------
    q, k_cache, v_cache, out
        As in `decode`.
    choices : tuple
        The arguments of `decode` that are no arrays, in the order of `_NAMES`.
    others : tuple
        Its other arrays, which are the last of `_NAMES`.
    padded : bool
        Whether the rows of the caches go on in memory, with zeros that fill whole chunks of 16
        bytes.
    """
    lengths, block_table, k_scale, v_scale, alibi_slopes, sinks = others
    if isinstance(q, np.ndarray):
        return run_in_8_bits_or_on_cpu(_named(q, k_cache, v_cache, out, *choices, *others))
    arrays: tuple[Array | None, ...] = ()
    dtypes: tuple[Any, ...] = ()
    if not (alibi_slopes is sinks is None):
        arrays = alibi_slopes, None, None, sinks, None  # as `ARRAYS`
        dtypes = tuple(map(calls.dtype_of, arrays))
    scales: tuple[Array | None, ...] = ()
    if not (k_scale is v_scale is None):
        scales = k_scale, v_scale
        dtypes = *dtypes, *map(calls.dtype_of, scales)
    common = "cache", block_table is None, padded, dtypes
    extras = Extras(arrays, (lengths, block_table), scales=scales)
    result = calls.run(q, k_cache, v_cache, out, choices, common, extras)
    if result is None:
        arguments = _named(q, k_cache, v_cache, out, *choices, *others)
        result = run_new(arguments, choices, common, extras, padded=padded)
    return result


def _named(*given: Any) -> dict[str, Any]:
    return dict(zip(_NAMES, given, strict=True))
