"""Problem + Device -> Plan: which kernel, tile and grid a call uses. Integers only, no CuPy."""

from __future__ import annotations

from typing import NamedTuple

from cufa.device import Device
from cufa.problem import Problem
from cufa.variant import KERNEL_DTYPES, Variant

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)
"""Head dims that are compiled; others are padded with zeros to the next of them.

Wider steps would waste products, narrower ones compile more variants for head dims that few models have.
"""

SPLIT_HEAD_DIMS = ((192, 128),)
"""Pairs of different head dims of Q/K and V that are compiled as such (multi-head latent attention)."""

_MAX_GRID = 2**31 - 1


class _TileShape(NamedTuple):
    bm: int
    bn: int
    stages: int
    warps: int
    blocks_per_sm: int


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
    workspace_floats: int
    reason: str

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.variant} grid={self.grid} block={self.block} smem={self.smem_bytes} "
            f"section_heads={self.section_heads} ({self.reason})"
        )


# Tile shapes by padded head dim (the larger of the two). The first is for long queries; the second,
# with fewer rows, for short queries and for grids that would leave multiprocessors idle.
_MMA_LARGE_SMEM = {
    32: (_TileShape(128, 64, 2, 4, 2), _TileShape(64, 64, 2, 4, 2)),
    64: (_TileShape(128, 64, 2, 4, 2), _TileShape(64, 64, 2, 4, 2)),
    96: (_TileShape(128, 64, 2, 4, 2), _TileShape(64, 64, 2, 4, 2)),
    128: (_TileShape(128, 32, 2, 4, 2), _TileShape(64, 64, 2, 4, 2)),
    160: (_TileShape(64, 64, 2, 4, 1), _TileShape(64, 64, 2, 4, 1)),
    192: (_TileShape(64, 64, 2, 4, 1), _TileShape(64, 64, 2, 4, 1)),
    256: (_TileShape(64, 32, 2, 4, 1), _TileShape(64, 32, 2, 4, 1)),
}
_MMA_SMALL_SMEM = _MMA_LARGE_SMEM
_FP32_LARGE_SMEM = {
    32: (_TileShape(64, 64, 2, 4, 2), _TileShape(64, 64, 2, 4, 2)),
    64: (_TileShape(64, 64, 2, 4, 2), _TileShape(64, 64, 2, 4, 2)),
    96: (_TileShape(64, 32, 2, 4, 2), _TileShape(64, 32, 2, 4, 2)),
    128: (_TileShape(64, 32, 2, 4, 2), _TileShape(64, 32, 2, 4, 2)),
    160: (_TileShape(64, 32, 1, 4, 1), _TileShape(64, 32, 1, 4, 1)),
    192: (_TileShape(64, 32, 1, 4, 1), _TileShape(64, 32, 1, 4, 1)),
    256: (_TileShape(64, 16, 1, 4, 1), _TileShape(64, 16, 1, 4, 1)),
}
_FP32_SMALL_SMEM = _FP32_LARGE_SMEM
_FA1 = {d: (_TileShape(32, 32, 1, 8, 1),) for d in HEAD_DIMS}
_TILES = {
    ("fa1_fp32", True): _FA1,
    ("fa1_fp32", False): _FA1,
    ("fa2_fp32", True): _FP32_LARGE_SMEM,
    ("fa2_fp32", False): _FP32_SMALL_SMEM,
    ("fa2_mma", True): _MMA_LARGE_SMEM,
    ("fa2_mma", False): _MMA_SMALL_SMEM,
}
_LARGE_SMEM = 160 << 10  # sm_80, sm_90 and sm_100 have it; sm_86, sm_89 and sm_120 do not


def _padded(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    for pair in SPLIT_HEAD_DIMS:
        if (head_dim, head_dim_v) == pair:
            return pair
    both = max(head_dim, head_dim_v)
    padded = next(d for d in HEAD_DIMS if d >= both)
    return padded, padded


def _section_heads(problem: Problem, device: Device) -> int:
    """Heads whose tiles are interleaved: as many as have their K and V in half of L2 together."""
    if not problem.causal:
        return 1  # all tiles are of one length: those of a head follow each other
    size = 4 if problem.dtype == "float32" else 2
    kv_bytes = max(1, problem.seq_kv * (problem.head_dim + problem.head_dim_v) * size)
    kv_heads = max(1, device.l2_bytes // 2 // kv_bytes)
    return max(1, min(kv_heads * problem.group, problem.batch * problem.heads_q))


def _planned(problem: Problem, variant: Variant, device: Device, reason: str) -> Plan:
    heads = problem.batch * problem.heads_q
    q_tiles = -(-problem.seq_q // variant.bm)
    fa1 = variant.kernel == "fa1_fp32"
    grid = heads if fa1 else heads * q_tiles
    if grid > _MAX_GRID:
        raise ValueError(
            f"q: batch {problem.batch} x heads {problem.heads_q} x seq {problem.seq_q} needs {grid} blocks, "
            f"more than a grid's {_MAX_GRID}"
        )
    return Plan(
        variant=variant,
        grid=grid,
        block=variant.threads,
        smem_bytes=variant.smem_bytes,
        q_tiles=q_tiles,
        section_heads=_section_heads(problem, device),
        workspace_floats=2 * heads * problem.seq_q if fa1 else 0,
        reason=reason,
    )


def candidates(
    kernel: str, dtype: str, head_dims: tuple[int, int], causal: bool, device: Device
) -> list[Variant]:
    """Return the variants of a kernel that `plan` chooses from for padded head dims, best for long queries first."""
    shapes = _TILES[kernel, device.smem_per_block >= _LARGE_SMEM][max(head_dims)]
    return [Variant(kernel, dtype, *head_dims, *shape, causal) for shape in dict.fromkeys(shapes)]


def all_variants(device: Device) -> list[Variant]:
    """Return every variant that `plan` can choose on a device."""
    pairs = [*((d, d) for d in HEAD_DIMS), *SPLIT_HEAD_DIMS]
    return [
        variant
        for kernel, dtypes in KERNEL_DTYPES.items()
        for dtype in dtypes
        for pair in pairs
        for causal in (False, True)
        for variant in candidates(kernel, dtype, pair, causal, device)
    ]


def _check_forced(problem: Problem, variant: Variant, device: Device) -> None:
    complaint = variant.illegal(device)
    if complaint is None and variant.dtype != problem.dtype:
        complaint = f"it is for {variant.dtype}, q has {problem.dtype}"
    if complaint is None and (
        variant.head_dim < problem.head_dim or variant.head_dim_v < problem.head_dim_v
    ):
        complaint = (
            f"its head dims {variant.head_dim} and {variant.head_dim_v} are less than the problem's "
            f"{problem.head_dim} and {problem.head_dim_v}"
        )
    if complaint is None and variant.causal != problem.causal:
        complaint = f"its causal is {variant.causal}, the call's {problem.causal}"
    if complaint is not None:
        raise ValueError(f"kernel: {variant}: {complaint}")


def plan(problem: Problem, device: Device, kernel: str | Variant | None = None) -> Plan:
    """Choose how a problem runs on a device.

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
    if device.compute_capability < 80:
        raise ValueError(
            f"device: {device.name} has compute capability {device.compute_capability}, 80 is needed"
        )
    if isinstance(kernel, Variant):
        _check_forced(problem, kernel, device)
        return _planned(problem, kernel, device, "forced variant")
    if kernel is None:
        name = "fa2_fp32" if problem.dtype == "float32" else "fa2_mma"
        reason = f"default for {problem.dtype}"
    elif isinstance(kernel, str):
        if kernel not in KERNEL_DTYPES:
            raise ValueError(f"kernel must be one of {', '.join(KERNEL_DTYPES)}, not {kernel!r}")
        if problem.dtype not in KERNEL_DTYPES[kernel]:
            raise ValueError(
                f"kernel: {kernel} takes {' or '.join(KERNEL_DTYPES[kernel])}, q has {problem.dtype}"
            )
        name, reason = kernel, "forced kernel"
    else:
        raise TypeError(f"kernel must be a str or a Variant, not {type(kernel).__name__}")
    head_dims = _padded(problem.head_dim, problem.head_dim_v)
    long, *rest = candidates(name, problem.dtype, head_dims, problem.causal, device)
    choice = _planned(problem, long, device, f"{reason}, long queries")
    if rest and (problem.seq_q <= rest[0].bm or choice.grid < device.sm_count):
        return _planned(problem, rest[0], device, f"{reason}, short queries or few tiles")
    return choice
