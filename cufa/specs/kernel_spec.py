"""KernelSpec: what the rest of the package knows of a kernel that has a `Variant`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cufa.device import Device
from cufa.specs.template_arguments import NUMBERS, TemplateArguments


class TileShape(NamedTuple):
    """The template arguments of a `Variant` that are free for a given problem."""

    bm: int
    bn: int
    stages: int
    warps: int
    blocks_per_sm: int
    ping_pong: bool = False


HeadDims = tuple[int, int]
"""Head dims of Q and K, and of V and O."""

Tiles = Mapping[HeadDims, tuple[TileShape, ...]]
"""The tiles that the planner chooses from, by the padded head dims that are compiled.

A problem takes the first head dims that are no smaller than its own. Wider steps would waste
products on zeros, narrower ones compile variants for few models. (192, 128) is multi-head latent
attention.

Where tiles have no costs, the first is for long queries. The second, with fewer rows, is for short
queries and for grids that would leave multiprocessors idle; there is none where the first has 64
rows already. For gradients, the second is for scores that take more registers, see
`cufa.specs.backward.BackwardSpec.is_large`.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelSpec:
    """One kernel, as the rest of the package knows it.

    Attributes
    ----------
    name : str
        Name of the ``__global__`` function, and of its file.
    dtypes : tuple of str
        The element types that it takes.
    shared_memory : callable
        Template arguments -> dynamic shared memory of a block, in bytes, by what it holds.
    arguments : tuple of str
        The template arguments between the element type and the score, in order.
    derived : callable
        Rows of a tile -> the numbers of a `Variant` that the kernel does not take, by name.
    schedules : tuple of str
        The structs that say how the kernel orders its work: one of them is the template argument
        in front of the score. Empty for kernels that have one order.
    schedule : callable, optional
        Template arguments -> which of these is best, as far as is known.
    archs : tuple of str
        The architectures that it is for; empty for kernels that run on all.
    tma : bool
        Whether it reads through tensor maps: they come first in its parameter.
    decodes : bool
        Whether it is for `decode`: lengths may be on the device.
    is_dependent : bool
        Whether it is launched as `cufa.compiler.dependent` says.
    launch_registers : callable, optional
        Template arguments -> registers of a thread at launch, where the kernel counts on having
        exactly that many because it moves them between its warps.
    persistent : bool
        Whether a block takes one tile after the other; the grid is then no larger than what runs at
        once. If tiles differ in length, blocks draw them as they become free.
    packs_heads : bool
        Whether the rows of a group's query heads can share a tile.
    takes_heads : bool
        Whether a block takes a whole head, and loops over its rows.
    workspace : int
        float32 scratch in global memory for each row.
    tile_tables : mapping of int to Tiles
        By the compute capability from which on they hold; empty for kernels that decode.
    """

    name: str
    dtypes: tuple[str, ...]
    shared_memory: Callable[[TemplateArguments], dict[str, int]]
    arguments: tuple[str, ...] = NUMBERS
    derived: Callable[[int], dict[str, int]] = lambda bm: {}
    schedules: tuple[str, ...] = ()
    schedule: Callable[[TemplateArguments], str] | None = None
    archs: tuple[str, ...] = ()
    tma: bool = False
    decodes: bool = False
    is_dependent: bool = False
    launch_registers: Callable[[TemplateArguments], int] | None = None
    persistent: bool = False
    packs_heads: bool = False
    takes_heads: bool = False
    workspace: int = 0
    tile_tables: Mapping[int, Tiles] = field(default_factory=dict)

    def runs_on(self, device: Device) -> bool:
        """Whether a device has the instructions that this kernel needs."""
        return not self.archs or device.arch in self.archs

    def smem_bytes(self, v: TemplateArguments) -> int:
        """Return the dynamic shared memory of a block, in bytes."""
        return sum(self.shared_memory(v).values())

    def illegal(self, v: TemplateArguments, device: Device) -> str | None:
        """Say why an instantiation cannot run on a device; None if it can."""
        if v.dtype not in self.dtypes:
            return f"{v.kernel} takes {' or '.join(self.dtypes)}, not {v.dtype}"
        if not all(isinstance(n, int) and n > 0 for n in (getattr(v, name) for name in NUMBERS)):
            return "template arguments must be positive integers"
        if self.runs_on(device):
            return None
        return f"{v.kernel} is for {' and '.join(self.archs)}, not for {device.arch}"

    def _tiles(self, device: Device) -> Tiles:
        newest = max((cc for cc in self.tile_tables if cc <= device.compute_capability), default=0)
        return self.tile_tables.get(newest, {})

    def head_dims(self, device: Device) -> list[HeadDims]:
        """Return all head dims that are compiled for a device; none if it is too old."""
        return list(self._tiles(device))

    def padded(self, device: Device, head_dim: int, head_dim_v: int) -> HeadDims:
        """Return the compiled head dims that hold a problem's."""
        pairs = self._tiles(device)
        return next(pair for pair in pairs if pair[0] >= head_dim and pair[1] >= head_dim_v)

    def tiles(self, device: Device, head_dims: HeadDims) -> tuple[TileShape, ...]:
        """Return the tiles that the planner chooses from for padded head dims."""
        return self._tiles(device)[head_dims]
