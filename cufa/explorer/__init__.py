"""Explore kernel variants: enumerate, compile, check, time and rank them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cufa import device as devices
from cufa import optional
from cufa.api.attention import attention
from cufa.api.block_mask import BlockMask, mask_mod_of
from cufa.api.options import Causal, Layout, UserFunction, Window
from cufa.api.other_names import names_here
from cufa.arrays import Array, module_of_all
from cufa.checks import check_flag, check_seed
from cufa.device import Device
from cufa.explorer.exploration import Exploration, Interrupted
from cufa.explorer.gradients import GradientsOf
from cufa.explorer.inputs import Inputs, undrawn
from cufa.explorer.result import Row
from cufa.explorer.run import Progress, Run
from cufa.explorer.space import Space, checked_kernels
from cufa.explorer.subject import Subject
from cufa.features.expression.tracing import trace
from cufa.problem.extras import arrays_of
from cufa.problem.parse import parse
from cufa.problem.problem import Problem, checked

__all__ = ["Exploration", "Interrupted", "Progress", "Row", "explore"]


@names_here
def explore(
    q: Problem | Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    causal: Causal | None = None,
    window: Window | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    sinks: Array | None = None,
    score_mod: UserFunction | None = None,
    mask_mod: UserFunction | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float | None = None,
    seed: int | None = None,
    scale: float | None = None,
    layout: Layout | None = None,
    return_lse: bool | None = None,
    backward: bool = False,
    kernels: Iterable[str] | None = None,
    space: Space | None = None,
    arch: str | None = None,
    device: str | Device | None = None,
    jobs: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Exploration:
    """Compile the variants that can run a problem and, on the current GPU, check and time them.

    Parameters
    ----------
    q : Problem or array
        The problem, timed on random data, a bias and a mask included; or queries as
        `cufa.attention` takes them, timed as they are (those of NumPy in a copy on the GPU).
    k, v : array, optional
        Keys and values, with an array `q`.
    causal, window, attention_chunk, softcap, alibi_slopes, bias, mask, sinks, score_mod, mask_mod
        As in `cufa.attention`, with an array `q`.
    block_mask
        As in `cufa.attention`, with an array `q`. Arrays that functions read, those of `score_mod`
        and `mask_mod`, must be on the GPU where variants are timed; strings of C++ can only be
        compiled.
    dropout_p, seed, scale, layout, return_lse
        As in `cufa.attention`, with an array `q`; variants are timed without the log-sum-exp, and
        have scores that are as exact as that asks for.
    backward : bool
        Explore the gradients of a Problem by q, k and v instead: the tiles of the kernel's spec,
        all launches of a call timed together.
    kernels : iterable of str, optional
        The kernels to look at; by default the one that the planner takes for the dtype.
    space : mapping of str to iterable of int, or sequence of Variant, optional
        A mapping such as ``{"bn": (64, 80)}`` replaces the default values of the template arguments
        that it names: bm, bn, stages, warps, blocks_per_sm, head_dim, head_dim_v, ping_pong. All
        legal combinations are taken. Variants are taken as they are; one that is illegal becomes a
        row with the reason.
    arch : str, optional
        Such as "sm_90a": compile for it, and time nothing. Needs no GPU.
    device : str or Device, optional
        Such as "h100": the same, for a well-known GPU.
    jobs : int, optional
        Threads that compile; one a core by default.
    progress : callable, optional
        Called with a `Progress` after each step.

    Returns
    -------
    Exploration
        A row a variant; what does not compile, launch or compute rightly is a row, too.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not fit, and no GPU where neither `arch` nor `device` is given.
    ImportError
        CuPy is missing, which compiles the variants.
    Interrupted
        On Ctrl-C, with what was found so far.

    Examples
    --------
    >>> import cufa
    >>> shape = (2, 16, 8192, 128)
    >>> problem = cufa.Problem.of_shapes(shape, shape, shape, dtype="bfloat16", causal=True)
    >>> space = {"bm": (128,), "bn": (64, 80), "stages": (2,)}
    >>> found = cufa.explore(problem, space=space, arch="sm_90a")  # doctest: +SKIP
    """
    given = {name: value for name, value in locals().items() if value is not None}
    of_call = inspect.signature(attention).parameters  # which a Problem takes the place of
    options = {name: given[name] for name in of_call if name in given and name != "q"}
    names = None if kernels is None else checked_kernels(kernels)
    run = Run(jobs, progress)
    target, timed = _target(arch, device)
    if isinstance(q, Problem):
        if options:
            raise TypeError(
                f"{next(iter(options))} must not be given with a Problem, which says all"
            )
        if missing := undrawn(q):
            raise ValueError(f"q: what {missing} is like is not in a Problem: give q, k and v")
        problem, inputs = checked(q), None
    else:
        problem, inputs = _of_arrays({"q": q, "k": k, "v": v}, options, timed)
    if timed and not (problem.batch and problem.heads_q and problem.seq_q and problem.seq_kv):
        raise ValueError(f"q: there is nothing to time in {problem}")
    if check_flag("backward", backward) and inputs is not None:
        raise ValueError("backward: give q as a Problem, whose arrays are random")
    subject = GradientsOf(problem, target) if backward else Subject(problem, target, inputs)
    chosen = subject.variants(names, space)
    optional.cupy()
    try:
        run.build(subject, chosen)
        if timed:
            run.measure()
    except KeyboardInterrupt:
        raise Interrupted(run.exploration()) from None
    return run.exploration()


def _of_arrays(
    tensors: dict[str, Any], options: dict[str, Any], timed: bool
) -> tuple[Problem, Inputs]:
    """Return the problem of a call of `attention`, and its arrays: on the GPU, if it is timed."""
    block_mask = options.get("block_mask")
    score_mod, mask_mod = options.get("score_mod"), options.get("mask_mod")
    if block_mask is not None:
        mask_mod = mask_mod_of(block_mask, mask_mod)
    inputs = Inputs(
        ndim=np.ndim(tensors["q"]),
        arrays=arrays_of(options),
        traced=trace(score_mod, mask_mod),
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        seed=check_seed(options.get("seed", 0)),
    )
    check_flag("return_lse", options.get("return_lse", False))
    xp = module_of_all(tensors)
    if timed:
        xp = optional.cupy()
        inputs = inputs.on(xp)
        tensors = {name: xp.asarray(array) for name, array in tensors.items()}
    arguments = {**options, **tensors, **inputs.arrays, "block_mask": inputs.block_mask}
    problem, operands = parse(arguments, xp, inputs.traced)
    return problem, inputs._replace(tensors=operands[:3])


def _target(arch: str | None, device: str | Device | None) -> tuple[Device, bool]:
    """Return the GPU to compile for, and whether to time there."""
    if arch is not None and device is not None:
        raise ValueError("arch and device: give only one of the two")
    if arch is not None:
        if not isinstance(arch, str):
            raise TypeError(f"arch must be a string, not {type(arch).__name__}")
        return devices.of_arch(arch), False
    if isinstance(device, Device):
        return device, False
    if device is not None:
        if not isinstance(device, str):
            raise TypeError(f"device must be a name or a Device, not {type(device).__name__}")
        try:
            return devices.named(device), False
        except ValueError as error:
            raise ValueError(f"device: {error}") from None
    runtime = optional.cupy().cuda.runtime
    try:
        return devices.current(), True
    except runtime.CUDARuntimeError:
        raise ValueError(
            "arch must be given where there is no GPU, such as arch='sm_90a'"
        ) from None
