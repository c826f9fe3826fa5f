"""`attention_backward` and `attention_varlen_backward`: gradients of attention, and their plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cufa.api.block_mask import BlockMask
from cufa.api.gradients import FORWARD, INTO, explained, gradients_of
from cufa.api.options import Causal, Layout, UserFunction, Window
from cufa.api.other_names import arguments_of, names_here
from cufa.arrays import AnyArray, ArrayT
from cufa.cpu import attention as cpu
from cufa.features.window import NO_WINDOW
from cufa.planner.backward import BackwardPlan
from cufa.problem.parse_backward import TENSORS
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cufa.api.keywords import GradientOptions


@names_here
def attention_backward(
    dout: AnyArray,
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray,
    lse: AnyArray,
    *,
    wrt: Sequence[str] = TENSORS,
    causal: Causal = False,
    window: Window = NO_WINDOW,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: AnyArray | None = None,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    sinks: AnyArray | None = None,
    score_mod: UserFunction | None = None,
    mask_mod: UserFunction | None = None,
    block_mask: BlockMask | None = None,
    lengths_k: AnyArray | None = None,
    lengths_q: AnyArray | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    scale: float | None = None,
    layout: Layout = "bhsd",
    dq: AnyArray | None = None,
    dk: AnyArray | None = None,
    dv: AnyArray | None = None,
    deterministic: bool = False,
    kernel: str | Variant | None = None,
) -> tuple[ArrayT, ...]:
    """Compute the gradients of `attention` from that of its result.

    Parameters
    ----------
    dout : array, of the shape and dtype of `out`
        The gradient of a loss, which is one number, with respect to `out`. Any strides.
    q, k, v : array
        As in `attention`. The gradient of a K/V head is the sum over the query heads that share it.
        The gradient of a broadcast k or v (stride 0) has its full shape, and is not summed.
    out, lse : array
        The results of `attention` with ``return_lse=True`` and the same other arguments.
    wrt : tuple of str
        Names of the arrays to differentiate by: some of "q", "k", "v", "bias", "sinks", and of
        arrays of floats that `score_mod` reads. Other gradients are not computed.
    causal, window, attention_chunk, softcap, alibi_slopes, bias, mask, sinks
        As in `attention`.
    score_mod : function, optional
        As in `attention`. cufa differentiates it, operation by operation. At a kink, the derivative
        is that of one of the sides; that of rounding and comparisons is 0. C++ cannot be
        differentiated.
    mask_mod, block_mask, lengths_k, lengths_q, dropout_p, seed, scale, layout
        As in `attention`. Tiles that a `block_mask` hides take no time; the same seed drops the
        same weights.
    dq, dk, dv : array, optional
        Where gradients go: of the shapes and the dtype of q, k and v, sharing no memory with other
        arrays of the call. Only for arrays in `wrt`.
    deterministic : bool
        Whether two identical calls give the same bits. On the CPU they always do, and so do dk and
        dv on a GPU. There, tiles of keys then add to dq in a fixed order. Blocks that add to the
        same elements of the gradient of a bias wait for each other. For an array that `score_mod`
        reads, all blocks do, and the call takes many times as long.
    kernel : str or Variant, optional
        Must be None: the kernels of gradients cannot be chosen.

    Returns
    -------
    tuple of array
        The gradients in the order of `wrt`, in the shapes and dtypes of these arrays. Sums are
        float32, and rounded once. Gradients of queries that see no key are 0, and so are those
        beyond a length. The gradient of a bias is summed over axes along which it is broadcast.

    Raises
    ------
    TypeError, ValueError
        As `attention`; and for a `wrt`, a `dout`, an `out`, a `lse`, a `dq`, `dk` or `dv` that does
        not fit. Nothing is written then.

    Notes
    -----
    The method is FlashAttention-2 (Dao 2023, algorithm 2): scores are computed again, tile by tile,
    from the log-sum-exp. The gradient of a score is P (dP - delta), where delta is the sum of dout
    * out over a row. The gradient of a sink is the sum of -exp(sink - lse) delta over the rows of
    its head. ``docs/guide/gradients.md`` has a training step, says which memory a call needs, and
    connects the function to a library that differentiates.

    On a GPU the memory is kept for the next call on the stream. A call that is captured into a
    CUDA graph uses the memory of an earlier call on that stream.

    On a GPU, weights come from the log-sum-exp in float32, whose rounding is a relative error of
    2^-24 times the log-sum-exp in the weights. It matters in rows whose scores are all beyond some
    10^4 in magnitude. In a row of n scores of -1e9, gradients are n times too large: hide such
    rows by a mask instead, which makes their gradients 0.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q = np.ones((1, 8, 100, 64), np.float32)
    >>> k = v = np.ones((1, 2, 100, 64), np.float32)
    >>> out, lse = cufa.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = cufa.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dk.shape
    (1, 2, 100, 64)

    The gradient of a bias alone:

    >>> bias = np.zeros((8, 1, 100), np.float32)
    >>> out, lse = cufa.attention(q, k, v, bias=bias, return_lse=True)
    >>> (dbias,) = cufa.attention_backward(out, q, k, v, out, lse, bias=bias, wrt=("bias",))
    >>> dbias.shape
    (8, 1, 100)
    """
    return gradients_of(locals())


@names_here
def attention_varlen_backward(
    dout: AnyArray,
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray,
    lse: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    *,
    wrt: Sequence[str] = TENSORS,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: AnyArray | None = None,
    causal: Causal = False,
    window: Window = NO_WINDOW,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: AnyArray | None = None,
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    sinks: AnyArray | None = None,
    score_mod: UserFunction | None = None,
    mask_mod: UserFunction | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    scale: float | None = None,
    dq: AnyArray | None = None,
    dk: AnyArray | None = None,
    dv: AnyArray | None = None,
    deterministic: bool = False,
    kernel: str | Variant | None = None,
) -> tuple[ArrayT, ...]:
    """Compute the gradients of `attention_varlen` from that of its result.

    Parameters
    ----------
    dout : array, shape (total_q, hq, dv)
        The gradient of a loss, which is one number, with respect to `out`, in its dtype.
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k
        As in `attention_varlen`.
    out, lse : array, shapes (total_q, hq, dv) and (hq, total_q)
        The results of `attention_varlen` with ``return_lse=True`` and the same other arguments.
    wrt : tuple of str
        Names of the arrays to differentiate by, see `attention_backward`.
    causal, window, attention_chunk, softcap, alibi_slopes, bias, mask, sinks, score_mod, mask_mod
        As in `attention_varlen`; a `score_mod` is differentiated, see `attention_backward`.
    dropout_p, seed, scale
        As in `attention_varlen`.
    dq, dk, dv : array, optional
        Where gradients go, see `attention_backward`.
    deterministic : bool
        Whether two identical calls give the same bits. On the CPU they always do. On a GPU, blocks
        then wait for each other: offsets on the device that break the rules of `attention_varlen`
        may make them wait forever.
    kernel : str or Variant, optional
        Must be None, see `attention_backward`.

    Returns
    -------
    tuple of array
        The gradients in the order of `wrt`, in the shapes and dtypes of these arrays. Rows
        that no sequence has, and keys that are not in use, have gradients of 0.

    Raises
    ------
    TypeError, ValueError
        As `attention_varlen` and `attention_backward`. Nothing is written then.

    Notes
    -----
    The method is that of `attention_backward`: FlashAttention-2 (Dao 2023, algorithm 2).

    Examples
    --------
    Sequences of 7, 120 and 33 tokens:

    >>> import numpy as np, cufa
    >>> q = k = v = np.ones((160, 8, 64), np.float32)
    >>> ends = np.array([0, 7, 127, 160], np.int32)
    >>> out, lse = cufa.attention_varlen(q, k, v, ends, ends, causal=True, return_lse=True)
    >>> dout = np.ones_like(out)
    >>> found = cufa.attention_varlen_backward(dout, q, k, v, out, lse, ends, ends, causal=True)
    >>> [x.shape for x in found]
    [(160, 8, 64), (160, 8, 64), (160, 8, 64)]
    """
    return gradients_of(locals())


@arguments_of(attention_backward, without=(*FORWARD, *INTO, "kernel"))
def explain_backward(
    q: AnyArray, k: AnyArray, v: AnyArray, **options: Unpack[GradientOptions]
) -> BackwardPlan | cpu.Plan:
    """Return how `attention_backward` would run a call; nothing is compiled or launched.

    Parameters
    ----------
    q, k, v, wrt, causal, window, attention_chunk, softcap, alibi_slopes, bias, mask, sinks
        As for `attention_backward`; its `dout`, `out` and `lse` are not needed.
    score_mod, mask_mod, block_mask, lengths_k, lengths_q, dropout_p, seed, scale, layout
        As for `attention_backward`.
    deterministic : bool
        As for `attention_backward`.

    Returns
    -------
    cufa.planner.backward.BackwardPlan or cufa.cpu.attention.Plan
        The latter for NumPy arrays. `str` of either is one line. The former has the launches in
        `steps`, in `expected_us` how many microseconds each would take on an H200, where
        known, and in `reason` whether the user's tuned table chose the variant.

    Raises
    ------
    TypeError, ValueError
        As `attention_backward`.

    Examples
    --------
    >>> import numpy as np, cufa
    >>> q = k = v = np.ones((1, 8, 100, 64), np.float32)
    >>> plan = cufa.explain_backward(q, k, v, causal=True)
    """
    return explained({"q": q, "k": k, "v": v, **options})
