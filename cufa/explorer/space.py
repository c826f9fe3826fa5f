"""Which variants an exploration looks at: those of the spec, or of what callers ask for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cufa.device import Device
from cufa.explorer.occupancy import register_bound, resident_blocks
from cufa.planner.plan import plan_tiles
from cufa.problem.problem import Problem
from cufa.specs import KERNELS, default_kernel
from cufa.specs.variant import Variant
from cufa.tuned import user_table

Space = Mapping[str, Iterable[int]] | Sequence[Variant]
"""Values of template arguments, whose legal combinations are all taken; or the variants."""

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
    values = checked_space(space or {})
    if kernels is None:
        tuned = plan_tiles(problem, device, table=user_table(device)).variant.kernel
        kernels = (default_kernel(problem.dtype, device).name, tuned)
    kernels = dict.fromkeys(kernels)
    found = dict.fromkeys(v for k in kernels for v in _of_kernel(problem, device, k, values))
    if not found:
        given = ", ".join(f"{name} in {list(v)}" for name, v in values.items()) or "its defaults"
        legal = {v for kernel in kernels for v in _of_kernel(problem, device, kernel, {})}
        known = (f"{name} is {sorted({getattr(v, name) for v in legal})}" for name in values)
        raise ValueError(
            f"space: nothing legal is left on {device.name} of {given}; in the default space, "
            f"{', '.join(known)}"
        )
    return list(found)


def checked_kernels(kernels: Iterable[str]) -> list[str]:
    """Return the names of kernels as a list; TypeError or ValueError if there are none."""
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


def checked_space(
    space: Mapping[str, Iterable[int]], names: Sequence[str] = _FIELDS, of_what: str = ""
) -> dict[str, tuple[int, ...]]:
    """Return values of template arguments; TypeError or ValueError where they are none."""
    checked: dict[str, tuple[int, ...]] = {}
    for name, values in space.items():
        if name not in names:
            raise ValueError(f"space: {name!r} is none of {', '.join(names)}{of_what}")
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"space: {name} must have a sequence of integers, not {values!r}")
        numbers = checked[name] = tuple(values)
        if not all(type(n) is int or (name == "ping_pong" and type(n) is bool) for n in numbers):
            raise TypeError(f"space: {name} must have integers, not {numbers!r}")
    return checked


def combinations(values: Mapping[str, Iterable[int]]) -> Iterator[dict[str, Any]]:
    """Yield every choice of one value for each template argument."""
    for numbers in itertools.product(*values.values()):
        yield dict(zip(values, numbers, strict=True))


def _of_kernel(
    problem: Problem, device: Device, kernel: str, given: Mapping[str, tuple[int, ...]]
) -> list[Variant]:
    planned = plan_tiles(problem, device, kernel, user_table(device)).variant
    spec = KERNELS[kernel]
    shapes = spec.tiles(device, (planned.head_dim, planned.head_dim_v))
    candidates = [planned, *(planned._replace(**shape._asdict()) for shape in shapes)]
    candidates = [v for v in candidates if all(getattr(v, f) in given[f] for f in given)]
    default = spec.space
    assert default is not None  # `plan` refuses those that decode
    usual = {name: (getattr(planned, name),) for name in ("head_dim", "head_dim_v")}
    usual |= {name: getattr(default, name) for name in _TILE}
    usual["blocks_per_sm"] = (1,)
    for arguments in combinations({**usual, **given}):
        arguments["ping_pong"] = bool(arguments["ping_pong"])
        variant = planned._replace(**arguments)
        if "blocks_per_sm" in given:
            candidates.append(variant)
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

    `blocks_per_sm` only bounds registers. The largest number of blocks that fits into shared memory
    stands for all numbers with the same bound.
    """
    most = resident_blocks(device, variant.threads, 1, variant.smem_bytes)
    bounds = {register_bound(device, variant.threads, n): n for n in range(1, most + 1)}
    counts = [n for bound, n in bounds.items() if bound >= needed]
    if keep_one and not counts:
        counts = [bounds[max(bounds)]]
    return [variant._replace(blocks_per_sm=n) for n in counts]
