"""Problem + Device -> Plan: which kernel, tile and grid a call uses. Integers only, no CuPy."""

from __future__ import annotations

from typing import NamedTuple

from cufa import kernel as kernels
from cufa.device import Device
from cufa.kernel import KERNELS
from cufa.planner import scheduler, tuned
from cufa.planner.tiles import all_head_dims, padded, tile_shapes
from cufa.problem import Problem
from cufa.variant import Variant

_MAX_GRID = 2**31 - 1
_MAX_LENGTH = 2**31 - 257  # lengths are 32-bit in the kernels, and rounded up to tiles


class Plan(NamedTuple):
    """How a call runs.

    Attributes
    ----------
    variant : Variant
    grid, block : int
        Blocks, and threads of a block.
    smem_bytes : int
        Dynamic shared memory of a block.
    q_tiles : int
        Row tiles of one head.
    section_heads : int
        Heads whose tiles run interleaved, see ``kernels/scheduler.cuh``.
    late_rows : int
        Row tiles of each head that come last, see ``kernels/scheduler_sm90.cuh``.
    pack : int
        Query heads of one K/V head whose rows a tile holds together.
    workspace_floats : int
        float32 scratch in global memory.
    reason : str
        Where the variant comes from.
    """

    variant: Variant
    grid: int
    block: int
    smem_bytes: int
    q_tiles: int
    section_heads: int
    late_rows: int
    pack: int
    workspace_floats: int
    reason: str

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.variant} grid={self.grid} block={self.block} smem={self.smem_bytes} "
            f"section_heads={self.section_heads} late_rows={self.late_rows} pack={self.pack} "
            f"({self.reason})"
        )


def _workspace_floats(problem: Problem, variant: Variant) -> int:
    rows = problem.batch * problem.heads_q * problem.seq_q
    return KERNELS[variant.kernel].workspace * rows


def _tiles(problem: Problem, variant: Variant) -> int:
    """Tiles of all heads; where blocks take whole heads, one each."""
    heads = scheduler.packed_heads(problem, variant)
    takes_heads = KERNELS[variant.kernel].takes_heads
    return heads if takes_heads else heads * scheduler.q_tiles(problem, variant)


def _blocks_at_once(variant: Variant, device: Device) -> int:
    """Blocks of a kernel whose blocks take one tile after the other; 0 for another kernel."""
    persistent = KERNELS[variant.kernel].persistent
    return variant.blocks_per_sm * device.sm_count if persistent else 0


def _countable(problem: Problem, variant: Variant, device: Device) -> bool:
    """Whether all tiles, and what each block asks for after the last one, have 32-bit numbers."""
    return _tiles(problem, variant) + _blocks_at_once(variant, device) <= _MAX_GRID


def _planned(problem: Problem, variant: Variant, device: Device, reason: str) -> Plan:
    grid = _tiles(problem, variant)
    if not _countable(problem, variant, device):
        raise ValueError(
            f"q: batch {problem.batch} x heads {problem.heads_q} x seq {problem.seq_q} needs "
            f"{grid} blocks, more than a grid's {_MAX_GRID}"
        )
    grid = min(grid, _blocks_at_once(variant, device) or grid)
    section_heads, late_rows = scheduler.sections(problem, variant, device)
    return Plan(
        variant=variant,
        grid=grid,
        block=variant.threads,
        smem_bytes=variant.smem_bytes,
        q_tiles=scheduler.q_tiles(problem, variant),
        section_heads=section_heads,
        late_rows=late_rows,
        pack=scheduler.pack(problem, variant),
        workspace_floats=_workspace_floats(problem, variant),
        reason=reason,
    )


def _candidates(
    kernel: str, dtype: str, head_dims: tuple[int, int], score: tuple[str, ...], device: Device
) -> list[Variant]:
    shapes = tile_shapes(kernel, head_dims, device)
    return [
        Variant(
            kernel=kernel,
            dtype=dtype,
            head_dim=head_dims[0],
            head_dim_v=head_dims[1],
            **shape._asdict(),
            score=score,
        )
        for shape in shapes
    ]


def all_variants(device: Device) -> list[Variant]:
    """Return every variant that `by_rules` can choose on a device."""
    return [
        variant
        for kernel in KERNELS.values()
        if kernel.runs_on(device)
        for dtype in kernel.dtypes
        for head_dims in all_head_dims(kernel.name, device)
        for score in ((), ("Causal",))
        for variant in _candidates(kernel.name, dtype, head_dims, score, device)
    ]


def _check_forced(problem: Problem, variant: Variant, device: Device) -> None:
    complaint = variant.illegal(device)
    if complaint is None and variant.dtype != problem.dtype:
        complaint = f"it is for {variant.dtype}, q has {problem.dtype}"
    tile_dims = (variant.head_dim, variant.head_dim_v)
    dims = (problem.head_dim, problem.head_dim_v)
    if complaint is None and (tile_dims[0] < dims[0] or tile_dims[1] < dims[1]):
        complaint = f"its head dims {tile_dims} are less than the problem's {dims}"
    if complaint is None and KERNELS[variant.kernel].needs_keys and problem.seq_kv == 0:
        complaint = "it needs at least one key"
    if complaint is None and variant.score != problem.score:
        complaint = f"its score is {variant.score}, the call's {problem.score}"
    if complaint is not None:
        raise ValueError(f"kernel: {variant!r}: {complaint}")


def _checked_name(kernel: object, dtype: str, device: Device) -> str:
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be a str or a Variant, not {type(kernel).__name__}")
    found = KERNELS.get(kernel)
    if found is None:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, not {kernel!r}")
    if dtype not in found.dtypes:
        takes = " or ".join(found.dtypes)
        raise ValueError(f"kernel: {kernel} takes {takes}, q has {dtype}")
    if not found.runs_on(device):
        archs = " and ".join(found.archs or ())
        raise ValueError(f"kernel: {kernel} is for {archs}, {device.name} is {device.arch}")
    return kernel


def _check_limits(problem: Problem, device: Device) -> None:
    if device.compute_capability < 80:
        raise ValueError(
            f"device: {device.name} has compute capability {device.compute_capability / 10}, "
            "8.0 is needed"
        )
    for name, length in (("q", problem.seq_q), ("k", problem.seq_kv)):
        if length > _MAX_LENGTH:
            raise ValueError(f"{name} has seq {length}, more than the kernels' {_MAX_LENGTH}")


def _kernel(problem: Problem, device: Device, forced: str | None) -> tuple[str, str]:
    """Return the kernel that runs unless a tuned table knows a better one, and why."""
    _check_limits(problem, device)
    if forced is not None:
        name, reason = _checked_name(forced, problem.dtype, device), "forced kernel"
        if problem.seq_kv == 0 and KERNELS[name].needs_keys:
            raise ValueError(f"kernel: {name} needs at least one key, k has seq 0")
        return name, reason
    default = kernels.default(problem.dtype, device)
    if problem.seq_kv == 0 and default.needs_keys:
        return kernels.default(problem.dtype, device, keys=False).name, "no keys"
    return default.name, f"default for {problem.dtype}"


def by_rules(problem: Problem, device: Device, kernel: str | None = None) -> Plan:
    """Choose as `plan` does where no tuned table knows better.

    Parameters
    ----------
    problem : Problem
    device : Device
    kernel : str, optional
        Forces a kernel.

    Raises
    ------
    TypeError, ValueError
        As `plan`.
    """
    name, reason = _kernel(problem, device, kernel)
    head_dims = padded(name, device, problem.head_dim, problem.head_dim_v)
    long, *short = _candidates(name, problem.dtype, head_dims, problem.score, device)
    choice = _planned(problem, long, device, reason)
    if short and (problem.seq_q <= short[0].bm or choice.grid < device.sm_count):
        return _planned(problem, short[0], device, f"{reason}, few queries")
    return choice


def plan(problem: Problem, device: Device, kernel: str | Variant | None = None) -> Plan:
    """Choose how a problem runs on a device: by the tuned tables, or else by the rules.

    Parameters
    ----------
    problem : Problem
    device : Device
    kernel : str or Variant, optional
        Forces a kernel, or one instantiation of it.

    Raises
    ------
    TypeError
        `kernel` is neither.
    ValueError
        `kernel` is unknown, or cannot run this problem on this device.
    """
    if isinstance(kernel, Variant):
        _check_limits(problem, device)
        _check_forced(problem, kernel, device)
        return _planned(problem, kernel, device, "forced variant")
    name, _ = _kernel(problem, device, kernel)
    found = tuned.lookup(problem, device, name, forced=kernel is not None)
    if found is not None:
        entry, reason = found
        variant = entry.variant(problem, device)
        no_keys = KERNELS[variant.kernel].needs_keys and problem.seq_kv == 0
        if not no_keys and _countable(problem, variant, device):
            forced = "" if kernel is None else "forced kernel, "
            return _planned(problem, variant, device, forced + reason)
    return by_rules(problem, device, kernel)
