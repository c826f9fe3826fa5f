"""Explore kernel variants: enumerate, compile, check, time and rank them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cufa import device as devices
from cufa import optional
from cufa.arrays import Array, Operands, array_module
from cufa.checks import NO_WINDOW
from cufa.device import Device
from cufa.explorer.exploration import Exploration, Interrupted
from cufa.explorer.result import Row
from cufa.explorer.run import Progress, Run, check_options
from cufa.explorer.space import Space, checked_kernels, variants
from cufa.problem import Problem, checked, parse, refuse_scores
from cufa.score import SOFTCAPS

_SCORES = ("Causal", "TopLeft", "WindowLeft", "WindowRight", *SOFTCAPS.values())
_DEFAULTS = {"causal": False, "window": NO_WINDOW, "softcap": None, "scale": None, "layout": "bhsd"}

__all__ = ["Exploration", "Interrupted", "Progress", "Row", "explore"]


def explore(
    q: Problem | Array,
    k: Array | None = None,
    v: Array | None = None,
    *,
    causal: bool | str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    layout: str | None = None,
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
        The problem, timed on random data; or queries as `cufa.attention` takes them, timed as they
        are (those of NumPy in a copy on the GPU).
    k, v : array, optional
        Keys and values, with an array `q`.
    causal, window, softcap, scale, layout
        As in `cufa.attention`, with an array `q`.
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
    """
    kernels = checked_kernels(kernels)
    check_options(jobs, progress)
    options = {"causal": causal, "window": window, "softcap": softcap}
    problem, operands = _problem(q, k, v, {**options, "scale": scale, "layout": layout})
    target, timed = _target(arch, device)
    if timed and not (problem.batch and problem.heads_q and problem.seq_q and problem.seq_kv):
        raise ValueError(f"q: there is nothing to time in {problem}")
    chosen = variants(problem, target, kernels, space)
    optional.cupy()
    run = Run(problem, target, jobs, progress)
    try:
        run.build(chosen)
        if timed:
            run.measure(operands)
    except KeyboardInterrupt:
        raise Interrupted(run.exploration()) from None
    return run.exploration()


def _problem(
    q: Problem | Array, k: Array | None, v: Array | None, options: dict[str, Any]
) -> tuple[Problem, Operands | None]:
    if isinstance(q, Problem):
        for name, value in {"k": k, "v": v, **options}.items():
            if value is not None:
                raise TypeError(f"{name} must not be given beside a Problem, which says all")
        return refuse_scores(checked(q), _SCORES), None
    xp = array_module(q, k, v)
    given = {name: value for name, value in options.items() if value is not None}
    problem, operands = parse(q, k, v, **{**_DEFAULTS, **given}, out=None, xp=xp)
    return refuse_scores(problem, _SCORES), operands


def _target(arch: str | None, device: str | Device | None) -> tuple[Device, bool]:
    """Return the GPU to compile for, and whether to time there."""
    if arch is not None and device is not None:
        raise ValueError("arch and device: give only one of the two")
    if arch is not None:
        if not isinstance(arch, str):
            raise TypeError(f"arch must be a string, not {type(arch).__name__}")
        return devices.of_arch(arch), False
    if device is not None:
        return _named(device), False
    runtime = optional.cupy().cuda.runtime
    try:
        return devices.current(), True
    except runtime.CUDARuntimeError:
        raise ValueError(
            "arch must be given where there is no GPU, such as arch='sm_90a'"
        ) from None


def _named(device: str | Device) -> Device:
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device must be a name or a Device, not {type(device).__name__}")
    try:
        return devices.named(device)
    except ValueError as error:
        raise ValueError(f"device: {error}") from None
