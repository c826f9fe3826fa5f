"""`explain_backward`: the plan of a call of `attention_backward`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cufa import device as devices
from cufa.api.arguments import call_of
from cufa.api.backward import read_by_function
from cufa.api.backward_gpu import traced
from cufa.api.block_mask import BlockMask, mask_mod_of
from cufa.api.options import Causal, Layout, UserFunction, Window
from cufa.arrays import AnyArray, array_module
from cufa.checks import check_flag
from cufa.cpu import attention as cpu
from cufa.cpu.functions import differentiable
from cufa.features.dropout import check_dropout
from cufa.features.expression.tracing import NOTHING
from cufa.features.window import NO_WINDOW
from cufa.launch.array_sums import wanted_of
from cufa.planner.backward import BackwardPlan
from cufa.planner.backward_model import explained
from cufa.problem.extras import arrays_of
from cufa.problem.parse_backward import TENSORS, Gradients, check_wrt
from cufa.tuned import user_table


def explain_backward(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
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
    deterministic: bool = False,
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
    check_flag("deterministic", deterministic)
    if block_mask is not None:
        mask_mod = mask_mod_of(block_mask, mask_mod)
    xp = array_module(q, k, v, None)
    dropout_p = check_dropout(dropout_p)
    score_arrays = arrays_of(locals())
    read = read_by_function(score_mod)
    wrt = check_wrt(wrt, {**read, "q": q, "k": k, "v": v, **score_arrays}, read)
    mods = NOTHING if xp is np else traced(wrt, score_mod, mask_mod, kernel=None)
    problem = call_of({**locals(), "return_lse": True}, mods, xp).problem
    if xp is np:
        differentiable(score_mod, mask_mod, read.keys() & {*wrt})
        return cpu.plan(problem)
    device = devices.current()
    sums = Gradients(
        bias=bias if "bias" in wrt else None,
        read={name: read[name] for name in mods.sums},
    )
    wanted, table = wanted_of(problem, sums, len(q.shape)), user_table(device)
    return explained(problem, device, wrt, deterministic, wanted=wanted, table=table)
