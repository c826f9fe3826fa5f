"""Which variants an exploration looks at: the default spaces as data, and what callers ask for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from cufa.device import Device
from cufa.explorer.occupancy import register_bound, resident_blocks
from cufa.kernel import default_kernel, row_warps
from cufa.planner.plan import plan
from cufa.planner.tiles import tiles
from cufa.problem import Problem
from cufa.tuned import user_table
from cufa.variant import Variant

Space = Mapping[str, Iterable[int]] | Sequence[Variant]
"""Values of template arguments, of which all legal products are taken; or the variants."""


class KernelSpace(NamedTuple):
    """The default space of one kernel.

    Attributes
    ----------
    bm, bn, stages, warps, ping_pong : tuple
        Values of these template arguments.
    registers : callable
        The registers of a thread below which a variant is sure to spill. Compilers surprise:
        it counts what must be live at once plus what the leanest compiled variants took for the
        rest, so that mild spilling stays in the space, to be seen and timed.
    """

    bm: tuple[int, ...]
    bn: tuple[int, ...]
    stages: tuple[int, ...]
    warps: tuple[int, ...]
    registers: Callable[[Variant], float]
    ping_pong: tuple[bool, ...] = (False,)


def _output(variant: Variant) -> float:
    """Accumulators of the output that a thread holds."""
    return variant.bm * variant.head_dim_v / variant.threads


def _scores(variant: Variant) -> float:
    """Scores of a tile that a thread holds."""
    return variant.bm * variant.bn / variant.threads


def _at_launch(variant: Variant, consumer: float) -> float:
    """Return a thread's registers at launch, for the consumers of fa3_wgmma to have so many."""
    consumers = variant.bm // 64
    producer = 24 if consumers == 2 else 32
    return (consumers * consumer + producer) / (consumers + 1)


DEFAULTS: dict[str, KernelSpace] = {
    # One to four 16-row pieces a warp. Fewer than 32 keys a tile leave few products between two
    # barriers, and a third stage already hides more than one tile's latency.
    "fa2_mma": KernelSpace(
        bm=(64, 128, 192, 256),
        bn=(32, 48, 64, 80, 96, 112, 128, 160, 192),
        stages=(1, 2, 3),
        warps=(4, 8),
        registers=lambda v: _output(v) + _scores(v) + 40,
    ),
    # Warps follow from bm. A single stage would have every copy waited for.
    "fa3_wgmma": KernelSpace(
        bm=(64, 128, 192),
        bn=(32, 48, 64, 80, 96, 112, 128, 144, 160, 176),
        stages=(2, 3),
        warps=(8, 12, 16),
        registers=lambda v: _at_launch(v, v.head_dim_v / 2 + v.bn * 3 / 4 + 28),
        ping_pong=(False, True),
    ),
    # P is held in two parts beside O, by both warps where two share a row, and tiles take twice the
    # shared memory: smaller ones.
    "fa2_fp32": KernelSpace(
        bm=(64, 128, 192),
        bn=(16, 32, 48, 64, 96, 128),
        stages=(1, 2, 3),
        warps=(4, 8),
        registers=lambda v: _output(v) + 2 * _scores(v) * v.warps / row_warps(v) + 64,
    ),
    # One block works on a head, so few large ones; the scores pass through shared memory, and two
    # copies of them are live while their sums are formed.
    "fa1_fp32": KernelSpace(
        bm=(24, 32, 48, 64, 96, 128),
        bn=(32, 64, 128),
        stages=(1,),
        warps=(4, 8),
        registers=lambda v: max(_output(v), 2 * _scores(v)) + 48,
    ),
}
"""The default space of each kernel. Causal is the problem's, head dims are the planner's."""

_TILE = ("bm", "bn", "stages", "warps", "ping_pong")
_DEMANDING = ("bm", "bn", "warps")  # of registers
_FIELDS = (*_TILE, "blocks_per_sm", "head_dim", "head_dim_v")


def variants(
    problem: Problem,
    device: Device,
    kernels: Iterable[str] | None = None,
    space: Space | None = None,
) -> list[Variant]:
    """Return the variants to explore for a problem on a device.

    Parameters
    ----------
    problem : Problem
    device : Device
    kernels : iterable of str, optional
        Their names; by default the one that the planner takes for the dtype.
    space : mapping of str to iterable of int, or sequence of Variant, optional
        A mapping replaces the default values of the template arguments that it names, and all legal
        combinations are taken. Variants are taken as they are, also where they are illegal.

    Returns
    -------
    list of Variant
        The planner's own choices come first, as far as `space` lets them in.

    Raises
    ------
    TypeError
        `space` is neither a mapping nor variants, or a value is no integer.
    ValueError
        A kernel or a template argument is unknown, or nothing legal is left.
    """
    if space is not None and not isinstance(space, Mapping):
        return _given(kernels, space)
    values = _checked(space or {})
    if kernels is None:
        tuned = plan(problem, device, table=user_table(device)).variant.kernel
        kernels = (default_kernel(problem.dtype, device).name, tuned)
    found: dict[Variant, None] = {}
    for kernel in dict.fromkeys(kernels):
        found.update(dict.fromkeys(_of_kernel(problem, device, kernel, values)))
    if not found:
        given = ", ".join(f"{name} in {list(v)}" for name, v in values.items()) or "its defaults"
        raise ValueError(f"space: nothing legal is left on {device.name} of {given}")
    return list(found)


def checked_kernels(kernels: Iterable[str] | None) -> list[str] | None:
    """Return the names of kernels as a list, or None as it is; TypeError or ValueError if none."""
    if kernels is None:
        return None
    if isinstance(kernels, str) or not isinstance(kernels, Iterable):
        raise TypeError(f"kernels must be a sequence of names, not {kernels!r}")
    names = list(kernels)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"kernels must be a sequence of names, not {names!r}")
    if not names:
        raise ValueError("kernels has no name")
    return names


def _given(kernels: Iterable[str] | None, space: Sequence[Variant]) -> list[Variant]:
    if kernels is not None:
        raise ValueError("kernels: the variants of space name theirs, so give only one of the two")
    given = list(space) if isinstance(space, Iterable) else [space]
    if not all(isinstance(v, Variant) for v in given):
        raise TypeError("space must map template arguments to values, or be a sequence of Variant")
    if not given:
        raise ValueError("space has no variant")
    return list(dict.fromkeys(given))


def _checked(space: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    for name, values in space.items():
        if name not in _FIELDS:
            raise ValueError(f"space: {name!r} is none of {', '.join(_FIELDS)}")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"space: {name} must have a sequence of integers, not {values!r}")
    checked = {name: tuple(values) for name, values in space.items()}
    for name, numbers in checked.items():
        if not all(type(n) is int or (name == "ping_pong" and type(n) is bool) for n in numbers):
            raise TypeError(f"space: {name} must have integers, not {numbers!r}")
    return checked


def _of_kernel(
    problem: Problem, device: Device, kernel: str, given: Mapping[str, tuple[int, ...]]
) -> list[Variant]:
    planned = plan(problem, device, kernel, user_table(device)).variant
    head_dims = (planned.head_dim, planned.head_dim_v)
    shapes = tiles(kernel, head_dims, device)
    candidates = [planned, *(planned._replace(**shape._asdict()) for shape in shapes)]
    candidates = [v for v in candidates if all(getattr(v, f) in given[f] for f in given)]
    default = DEFAULTS[kernel]
    axes = {
        "head_dim": given.get("head_dim", (planned.head_dim,)),
        "head_dim_v": given.get("head_dim_v", (planned.head_dim_v,)),
        **{name: given.get(name, getattr(default, name)) for name in _TILE},
    }
    for numbers in itertools.product(*axes.values()):
        arguments = dict(zip(axes, numbers, strict=True))
        arguments["ping_pong"] = bool(arguments["ping_pong"])
        variant = planned._replace(**arguments, blocks_per_sm=1)
        if "blocks_per_sm" in given:
            candidates += [variant._replace(blocks_per_sm=n) for n in given["blocks_per_sm"]]
        elif variant.illegal(device) is None:
            # A tile that was asked for is shown, however it spills, and others only if useful.
            asked = not given.keys().isdisjoint(_DEMANDING)
            candidates += _bounded(variant, device, default.registers(variant), asked)
    return [
        v
        for v in candidates
        if v.illegal(device) is None
        and v.head_dim >= problem.head_dim
        and v.head_dim_v >= problem.head_dim_v
    ]


def _bounded(variant: Variant, device: Device, needed: float, keep_one: bool) -> list[Variant]:
    """Return a variant under each bound of registers that leaves it the needed ones.

    `blocks_per_sm` does nothing else than to bound registers: of the numbers of blocks that have
    the same bound, and that shared memory lets in, the largest stands for all.
    """
    most = resident_blocks(device, variant.threads, 1, variant.smem_bytes)
    bounds = {register_bound(device, variant.threads, n): n for n in range(1, most + 1)}
    counts = [n for bound, n in bounds.items() if bound >= needed]
    if keep_one and not counts:
        counts = [bounds[max(bounds)]]
    return [variant._replace(blocks_per_sm=n) for n in counts]
