"""DecodeProblem + Device -> DecodePlan: how `decode` runs."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cufa.decode_problem import DecodeProblem
from cufa.device import Device
from cufa.kernel import ELEMENT_BYTES, KERNELS
from cufa.variant import Variant

MAX_TILES = 2**31 - 2**16
"""Tiles of keys of all sequences together: they have 32-bit numbers."""

_MAX_ROWS = 2**31 - 2**8
"""Rows that share a K/V head, and heads of all sequences: 32-bit numbers, rounded up to tiles."""

_RINGS = ((32, 3, 8), (16, 2, 8), (16, 3, 4), (16, 2, 4), (16, 2, 2))
"""Keys of a tile, stages and warps: the first that fits is taken. To read at full speed, a
multiprocessor must have asked for some 30 KB at any time."""


class DecodePlan(NamedTuple):
    """How one call of `decode` runs.

    Attributes
    ----------
    variant : Variant
    grid, block : int
        Blocks, and threads of a block.
    smem_bytes : int
        Of a block.
    row_tiles : int
        Tiles of the rows that share a K/V head.
    splits : int
        Parts of every sequence; 0 where blocks share out all keys evenly.
    reason : str
        Why it is not a kernel of attention's own, for a call of `attention`.
    """

    variant: Variant
    grid: int
    block: int
    smem_bytes: int
    row_tiles: int
    splits: int
    reason: str = ""

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.variant} grid={self.grid} block={self.block} smem={self.smem_bytes} "
            f"row_tiles={self.row_tiles} splits={self.splits} ({self.reason})"
        )

    @property
    def partial_floats(self) -> int:
        """float32 numbers that pieces of sequences need: two places a block, if there are any."""
        if self.splits == 1:
            return 0
        rows = 2 * self.grid * self.variant.bm
        return rows * (self.variant.head_dim_v + 2)


def plan(
    problem: DecodeProblem,
    device: Device,
    num_splits: int | None = None,
    kernel: str | Variant | None = None,
) -> DecodePlan:
    """Choose how a problem runs on a device.

    Without `num_splits` there are as many blocks as run at once, but no more than there are tiles
    of keys. How they share the keys out is found where lengths are known: on the device.

    Parameters
    ----------
    problem : DecodeProblem
        Not empty.
    device : Device
    num_splits : int, optional
        Parts of every sequence.
    kernel : str or Variant, optional
        Forces a kernel, or one instantiation of it.

    Raises
    ------
    TypeError
        `kernel` is neither.
    ValueError
        `kernel` is unknown or cannot run this problem on this device, or the problem is too large.
    """
    if device.compute_capability < 80:
        raise ValueError(
            f"device: {device.name} has compute capability {device.compute_capability / 10}, "
            "8.0 is needed"
        )
    rows, heads = problem.group * problem.seq_q, problem.batch * problem.heads_q
    if max(rows, heads) > _MAX_ROWS:
        raise ValueError(
            f"q: {rows} rows that share a K/V head, or {heads} heads of all sequences, are more "
            f"than {_MAX_ROWS}"
        )
    variant = _chosen(problem, device, kernel)
    row_tiles = -(-rows // variant.bm)
    units = problem.batch * problem.heads_kv * row_tiles
    tiles = max(1, -(-problem.capacity // variant.bn))
    if units * tiles > MAX_TILES:
        raise ValueError(
            f"k_cache: {units} x {tiles} tiles of keys, of all sequences and heads, are more than "
            f"{MAX_TILES}"
        )
    if num_splits is None:
        grid, splits = min(device.sm_count * variant.blocks_per_sm, units * tiles), 0
    else:
        splits = min(num_splits, tiles)  # others would have no key in any sequence
        grid = units * splits
    return DecodePlan(variant, grid, variant.threads, variant.smem_bytes, row_tiles, splits)


def _chosen(problem: DecodeProblem, device: Device, kernel: str | Variant | None) -> Variant:
    if kernel is not None and not isinstance(kernel, (str, Variant)):
        raise TypeError(f"kernel must be a str or a Variant, not {type(kernel).__name__}")
    if isinstance(kernel, Variant):
        complaint = kernel.illegal(device)
        dims, most = (problem.head_dim, problem.head_dim_v), (kernel.head_dim, kernel.head_dim_v)
        if complaint is None and not KERNELS[kernel.kernel].decodes:
            complaint = "it is not for decode"
        if complaint is None and kernel.dtype != problem.dtype:
            complaint = f"it is for {kernel.dtype}, q has {problem.dtype}"
        if complaint is None and (most[0] < dims[0] or most[1] < dims[1]):
            complaint = f"its head dims {most} are less than the problem's {dims}"
        if complaint is None and kernel != _finding(kernel, problem):
            needed = _finding(kernel, problem)
            complaint = f"the call needs the score {needed.score} and {needed.kv}"
        if complaint is not None:
            raise ValueError(f"kernel: {kernel!r}: {complaint}")
        return kernel
    name = kernel or "decode"
    if name not in KERNELS or not KERNELS[name].decodes:
        names = ", ".join(each.name for each in KERNELS.values() if each.decodes)
        raise ValueError(f"kernel must be one of {names}, not {name!r}")
    if problem.dtype not in KERNELS[name].dtypes:
        takes = " or ".join(KERNELS[name].dtypes)
        raise ValueError(f"kernel: {name} takes {takes}, q has {problem.dtype}")
    rows = problem.group * problem.seq_q
    head_dims = problem.head_dim, problem.head_dim_v
    return _finding(_variant(name, problem.dtype, head_dims, rows > 32, device), problem)


def _finding(variant: Variant, problem: DecodeProblem) -> Variant:
    """Return a variant with a problem's score and its way of finding K and V."""
    if not problem.is_paged:
        kv = "Contiguous"
    else:
        kv = "Paged" if problem.page_size % variant.bn else "PagedTiles"
    return variant._replace(score=problem.score, kv=kv)


@functools.lru_cache(maxsize=4096)
def _variant(
    kernel: str,
    dtype: str,
    head_dims: tuple[int, int],
    many_rows: bool,
    device: Device,
) -> Variant:
    """Return the variant with the deepest rings that fit."""
    d, dv = (_padded(n) for n in head_dims)
    size = ELEMENT_BYTES[dtype]
    bm = 32 if many_rows and dv <= 128 and size == 2 else 16  # registers hold O of so many rows
    for bn, stages, warps in _RINGS:
        variant = Variant(kernel, dtype, d, dv, bm, bn, stages, warps, 1, kv="Contiguous")
        complaint = variant.illegal(device)
        if (bn == 16 or max(d, dv) * size <= 128) and complaint is None:
            return variant
    raise ValueError(
        f"k_cache: {device.name} cannot decode {dtype} with these head dims: {complaint}"
    )


def _padded(head_dim: int) -> int:
    """Return the head dim that is compiled."""
    return next(n for n in (32, 64, 96, 128, 192, 256) if head_dim <= n)
