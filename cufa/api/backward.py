"""`attention_backward`: the gradients of `attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cufa.api.arguments import Call, call_of
from cufa.api.backward_gpu import gradients_on_gpu, traced
from cufa.api.block_mask import BlockMask, mask_mod_of
from cufa.api.options import Causal, Layout, UserFunction, Window
from cufa.api.other_names import names_here
from cufa.arrays import AnyArray, ArrayT, module_of_all
from cufa.checks import check_flag, refuse_kernel
from cufa.cpu.backward import attention_backward as on_cpu
from cufa.cpu.functions import differentiable
from cufa.features.dropout import check_dropout
from cufa.features.expression.tracing import NOTHING, TracedFunctions, check, read_by
from cufa.features.parts import ARRAYS
from cufa.features.window import NO_WINDOW
from cufa.problem.extras import arrays_of
from cufa.problem.parse_backward import (
    TENSORS,
    WRT,
    Gradients,
    Results,
    check_gradients,
    check_results,
    check_wrt,
)
from cufa.specs.variant import Variant


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
    return gradients_of(locals(), call_of)


def gradients_of(
    given: Mapping[str, Any],
    checked: Callable[[Mapping[str, Any], TracedFunctions, ModuleType], Call],
) -> tuple[Any, ...]:
    """Compute gradients, whatever says how long sequences are.

    Parameters
    ----------
    given : mapping
        The arguments of `attention_backward`, or of `attention_varlen_backward`, by name.
    checked : callable
        Checks the arguments of the forward call. Called with the arguments by name, the caller's
        traced functions, and the module that arrays belong to.
    """
    arguments = {**given, "out": None, "return_lse": True}
    forward = {name: given[name] for name in ("dout", "out", "lse")}
    tensors = {name: given[name] for name in TENSORS}
    into = {f"d{name}": given[f"d{name}"] for name in TENSORS}
    score_arrays, block_mask, kernel = arrays_of(given), given.get("block_mask"), given["kernel"]
    written: dict[str, Any] = {name: array for name, array in into.items() if array is not None}
    xp = module_of_all({**tensors, **forward, **written})
    if block_mask is not None:
        arguments["mask_mod"] = mask_mod_of(block_mask, given["mask_mod"])
    mods = arguments["score_mod"], arguments["mask_mod"]
    arguments["dropout_p"] = check_dropout(given["dropout_p"])
    deterministic = check_flag("deterministic", given["deterministic"])
    read = read_by_function(mods[0])
    named = {**read, **tensors, **score_arrays, **into}
    wrt = check_wrt(given["wrt"], named, read)
    functions = NOTHING if xp is np else traced(wrt, *mods, kernel)
    call = checked(arguments, functions, xp)
    dout, out, lse = check_results(forward, tensors["q"], call.shapes, xp)
    of_lse = lse.reshape(call.operands.q.shape[:3])
    results = Results(call.view(dout), call.view(out), of_lse)
    inputs = {**tensors, **forward, **score_arrays, **{name: given[name] for name in call.lengths}}
    check_gradients(into, {**inputs, **functions.read}, xp)
    if xp is not np:
        arrays = tuple(given.get(name) for name in ARRAYS)
        return gradients_on_gpu(call, results, named, arrays, functions, wrt, deterministic)
    refuse_kernel(kernel)
    tiles = None if block_mask is None else (block_mask.kinds, block_mask.block)
    host_functions = differentiable(*mods, read.keys() & {*wrt}, tiles)
    for name, array in written.items():
        host_functions.check_apart(name, array)
    gradients = made(wrt, named, host_functions.is_called)
    views = gradients.viewed(call.view, call.ndim)
    whole = call.problem, call.operands._replace(out=results.out), results, views
    on_cpu(*whole, call.lengths, host_functions)
    return returned(wrt, gradients, named)


def read_by_function(score_mod: object) -> dict[str, Any]:
    """Return what a `score_mod` can be differentiated by: arrays of floats, by name."""
    if score_mod is None or isinstance(score_mod, str):
        return {}
    return read_by(check("score_mod", score_mod))


def made(wrt: tuple[str, ...], given: Mapping[str, Any], apart: bool) -> Gradients:
    """Return the arrays that gradients are computed in.

    Parameters
    ----------
    wrt : tuple of str
    given : mapping
        Arguments of the call, by name.
    apart : bool
        True: new arrays, so that an exception of the caller's function leaves dq, dk and dv
        unchanged.
    """
    found: dict[str, np.ndarray] = {}
    for name in wrt:
        array, target = given[name], given.get(f"d{name}")
        if name not in TENSORS:
            # One number of an array that a function reads may have as many addends as scores.
            found[name] = np.zeros(array.shape, np.float32 if name in WRT else np.float64)
        elif target is None or apart:
            found[name] = np.empty(array.shape, array.dtype)
        else:
            found[name] = np.asarray(target)
    read = {name: found.pop(name) for name in wrt if name not in WRT}
    return Gradients(**found, read=read)


def returned(
    wrt: tuple[str, ...], gradients: Gradients, given: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return gradients as the caller wants them; arguments as in `made`."""
    found = []
    for name in wrt:
        target = given.get(f"d{name}") if name in TENSORS else None
        gradient = getattr(gradients, name) if name in WRT else gradients.read[name]
        if target is None:
            gradient = gradient.astype(given[name].dtype, copy=False)
        elif gradient is not target:
            target[...] = gradient
            gradient = target
        found.append(gradient)
    return tuple(found)
