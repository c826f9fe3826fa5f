"""`attention_varlen_backward`: the gradients of `attention_varlen`."""

from __future__ import annotations

from collections.abc import Sequence

from cufa.api.gradients import gradients_of
from cufa.api.options import Causal, UserFunction, Window
from cufa.api.other_names import names_here
from cufa.arrays import AnyArray, ArrayT
from cufa.features.window import NO_WINDOW
from cufa.problem.parse_backward import TENSORS
from cufa.specs.variant import Variant


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
