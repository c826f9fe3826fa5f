"""Problem + Device -> Plan: which kernel, tile and grid a call uses. Integers only, no CuPy."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cufa.device import Device
from cufa.features.parts import kind_of, part_named
from cufa.planner import checks, rules, scheduler
from cufa.planner.problem_class import problem_class
from cufa.planner.tuned_table import Table
from cufa.problem.problem import Problem
from cufa.specs import ATTENTION_KERNELS, default_kernel
from cufa.specs.spec import Spec
from cufa.specs.variant import Variant

MAX_GRID = 2**31 - 1
MAX_LENGTH = 2**31 - 257
"""Lengths are 32-bit in the kernels, and rounded up to tiles."""


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
        Row tiles of each head that come last, see ``kernels/scheduler.cuh``.
    pack : int
        Query heads of one K/V head whose rows a tile holds together.
    workspace_floats : int
        float32 scratch in global memory.
    reason : str
        Where the variant comes from.
    expected_us : tuple of (Variant, float)
        For `explain`: how many microseconds the variant and those that it was chosen from would
        take on an H200, the fastest first; as far as that is known.
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
    expected_us: tuple[tuple[Variant, float], ...] = ()

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.variant} grid={self.grid} block={self.block} smem={self.smem_bytes} "
            f"section_heads={self.section_heads} late_rows={self.late_rows} pack={self.pack} "
            f"({self.reason})"
        )


def plan_tiles(
    problem: Problem,
    device: Device,
    kernel: str | Variant | None = None,
    table: Table | None = None,
) -> Plan:
    """Choose how a problem runs on a device: by a tuned table, or else by the rules.

    Parameters
    ----------
    problem : Problem
    device : Device
    kernel : str or Variant, optional
        Forces a kernel, or one instantiation of it.
    table : Table, optional
        The table of this device, see `cufa.tuned.user_table`.

    Raises
    ------
    TypeError
        `kernel` is neither.
    ValueError
        `kernel` is unknown, or cannot run this problem on this device.
    """
    checks.check_device(device)
    checks.check_lengths(problem, "the kernels'", MAX_LENGTH)
    variant, reason = _chosen(problem, device, kernel, table)
    return planned(problem, variant, device, reason)


def _chosen(
    problem: Problem, device: Device, kernel: str | Variant | None, table: Table | None
) -> tuple[Variant, str]:
    """Return the variant, and where it comes from; arguments and errors as in `plan_tiles`."""
    if isinstance(kernel, Variant):
        checks.check_variant(problem, kernel, device, decodes=False)
        return kernel, "forced variant"
    if kernel is None:
        chosen = default_kernel(problem.dtype, device, problem.seq_kv > 0)
        reason = f"default for {problem.dtype}" if problem.seq_kv > 0 else "no keys"
    else:
        chosen, reason = _checked_kernel(problem, kernel, device), "forced kernel"
    if table is not None:
        tuned = _by_table(problem, device, table, chosen if kernel is not None else None)
        if tuned is not None:
            return tuned, table.reason if kernel is None else f"forced kernel, {table.reason}"
    return rules.choice_of(problem, device, chosen.name).of(problem.alike)[0], reason


def _checked_kernel(problem: Problem, name: object, device: Device) -> Spec:
    kernel = checks.kernel_named(name, problem.dtype, decodes=False)
    if not kernel.runs_on(device):
        archs = " and ".join(kernel.archs)
        raise ValueError(f"kernel: {name} is for {archs}, {device.name} is {device.arch}")
    if kernel.needs_keys and problem.seq_kv == 0:
        raise ValueError(f"kernel: {name} needs at least one key, k has seq 0")
    if problem.kv not in kernel.kvs:
        raise ValueError(f"kernel: {name} is not for sequences of unequal lengths")
    missing = [
        part_named(part).argument for part in problem.score if kind_of(part) not in kernel.scores
    ]
    if missing:
        raise ValueError(f"{missing[0]}: {name} has no such scores")
    return kernel


def _by_table(
    problem: Problem, device: Device, table: Table, forced: Spec | None
) -> Variant | None:
    """Return what a table says for a problem, if it can run."""
    entry = table.entries.get(problem_class(problem, device)) if problem.kv == "Dense" else None
    kernel = None if entry is None else ATTENTION_KERNELS.get(entry.kernel)
    if entry is None or kernel is None or kernel is not (forced or kernel):
        return None
    if problem.dtype not in kernel.dtypes or (kernel.needs_keys and problem.seq_kv == 0):
        return None
    if not kernel.runs_on(device):  # it may have no tiles there, nor head dims
        return None
    variant = entry.variant(problem, device)
    if variant.illegal(device) is not None:
        return None
    tiles = scheduler.order(problem, variant, device).tiles
    return variant if tiles + _block(variant, device)[-1] <= MAX_GRID else None


@functools.lru_cache(maxsize=4096)
def _block(variant: Variant, device: Device) -> tuple[int, int, int]:
    """Return threads and shared memory of a block, and how many blocks run at once.

    The last is 0 where each block takes one tile. Tiles, and what each of these blocks asks for
    after the last one, have 32-bit numbers.
    """
    at_once = variant.blocks_per_sm * device.sm_count if variant.spec.persistent else 0
    return variant.threads, variant.smem_bytes, at_once


def planned(problem: Problem, variant: Variant, device: Device, reason: str) -> Plan:
    """Return the plan of a problem by a variant that can run it."""
    pack, q_tiles, tiles, section_heads, late_rows = scheduler.order(problem, variant, device)
    threads, smem_bytes, at_once = _block(variant, device)
    if tiles + at_once > MAX_GRID:
        raise ValueError(
            f"q: batch {problem.batch} x heads {problem.heads_q} x seq {problem.seq_q} needs "
            f"{tiles} blocks, more than a grid's {MAX_GRID}"
        )
    workspace = variant.spec.workspace
    floats = workspace and workspace * problem.batch * problem.heads_q * problem.seq_q
    sizes = threads, smem_bytes, q_tiles, section_heads, late_rows, pack, floats
    return Plan(variant, min(tiles, at_once or tiles), *sizes, reason)
