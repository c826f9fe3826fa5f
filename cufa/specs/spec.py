"""Spec: what the rest of the package knows of a kernel that computes attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cufa.device import Device
from cufa.features.parts import PARTS, kind_of
from cufa.features.user_functions import OWN
from cufa.specs import kv
from cufa.specs.costs import Cost
from cufa.specs.params import MAPS, PARAMS, whole
from cufa.specs.rings import Ring
from cufa.specs.space import Space
from cufa.specs.template_arguments import NUMBERS, SWITCHES, TemplateArguments
from cufa.specs.tile_shape import TileShape

MAX_TILE = 256
"""Rows and columns of a tile at most: lengths are rounded up to it in 32 bits."""

HeadDims = tuple[int, int]
"""Head dims of Q and K, and of V and O."""

Tiles = Mapping[HeadDims, tuple[TileShape, ...]]
"""The tiles that the planner chooses from, by the padded head dims that are compiled.

A problem takes the first ones that hold its own. Wider steps would waste products on zeros,
narrower ones compile variants for few models. (192, 128) is multi-head latent attention.

Where tiles have no costs, the first is for long queries. The second, with fewer rows, is for short
queries and for grids that would leave multiprocessors idle; none where the first has 64 rows
already.
"""

Costs = Mapping[tuple[int, int, bool], Mapping[TileShape, Cost]]
"""Measured costs of tiles, by padded head dims and whether scores have an edge."""


class Spec(NamedTuple):
    """One kernel, as the rest of the package knows it.

    Attributes
    ----------
    name : str
        Name of the ``__global__`` function, of its file, and of its spec's file.
    dtypes : tuple of str
        The element types that it takes.
    shared_memory : callable
        Template arguments -> dynamic shared memory of a block, in bytes, by what it holds.
    complaint : callable
        Template arguments and Device -> why it cannot run, as far as the kernel's own rules say,
        or None.
    inputs, outputs : tuple of str
        The tensors that it reads and writes, as `params` names them.
    params : dtype
        The struct that its parameter begins with, but for tensor maps.
    arguments : tuple of str
        The template arguments between the element type and the score, in order.
    schedules : tuple of str
        The structs from which another template argument, the last in front of the score, is taken:
        how the kernel orders its work. None of those that have one order.
    schedule : callable, optional
        Template arguments -> which of these is best, as far as is known.
    archs : tuple of str, optional
        The architectures that it is for; None for all.
    max_head_dim, head_dim_step : int
        The most that a head dim can be; it is compiled in multiples of the step.
    tma : bool
        Whether it reads and writes through tensor maps: they come first in its parameter.
    persistent : bool
        Whether a block takes one tile after the other; the grid is then no larger than what runs at
        once. If tiles differ in length, blocks draw them as they become free.
    packs_heads : bool
        Whether the rows of a group's query heads can share a tile.
    needs_keys : bool
        Whether it cannot run without any.
    takes_heads : bool
        Whether a block takes a whole head, and loops over its rows.
    workspace : int
        float32 scratch in global memory for each row.
    flops_per_byte : int
        Floating-point operations of a busy multiprocessor in the time in which it could read a byte
        of global memory, as measured on an H200; for kernels of `attention`.
    scores, kvs : tuple of str
        The parts of a score, and the ways of finding K and V, that it takes.
    kv_dtype : str, optional
        The dtype of K and V if they have 8 bits and scales; else it is that of Q.
    decodes : bool
        Whether it is for `decode`: lengths may be on the device.
    is_dependent : bool
        Whether it is launched as `cufa.compiler.dependent` says.
    launch_registers : callable, optional
        Template arguments -> registers of a thread at launch, where the kernel counts on having
        exactly that many because it moves them between its warps.
    spare_registers : callable, optional
        Template arguments -> how many a thread of those that compute has besides its S, P and O,
        where it has not as many as it may ask for.
    tile_tables : mapping of int to Tiles
        By the compute capability from which on they hold; none of those that decode.
    rings : mapping of int to tuple of Ring
        Rings that the planner chooses from, by the rows of a tile; only of kernels that decode.
    costs : Costs
    space : Space, optional
        The explorer's; none of those that decode.
    """

    name: str
    dtypes: tuple[str, ...]
    shared_memory: Callable[[TemplateArguments], dict[str, int]]
    complaint: Callable[[TemplateArguments, Device], str | None]
    inputs: tuple[str, ...] = ("q", "k", "v")
    outputs: tuple[str, ...] = ("o", "lse")
    params: np.dtype = PARAMS
    arguments: tuple[str, ...] = NUMBERS
    schedules: tuple[str, ...] = ()
    schedule: Callable[[TemplateArguments], str] | None = None
    archs: tuple[str, ...] | None = None
    max_head_dim: int = 256
    head_dim_step: int = 16
    tma: bool = False
    persistent: bool = False
    packs_heads: bool = False
    needs_keys: bool = False
    takes_heads: bool = False
    workspace: int = 0
    flops_per_byte: int = 1
    scores: tuple[str, ...] = (*PARTS, *OWN.values())
    kvs: tuple[str, ...] = ("Dense",)
    kv_dtype: str | None = None
    decodes: bool = False
    is_dependent: bool = False
    launch_registers: Callable[[TemplateArguments], int] | None = None
    spare_registers: Callable[[TemplateArguments], int] | None = None
    tile_tables: Mapping[int, Tiles] = MappingProxyType({})
    rings: Mapping[int, tuple[Ring, ...]] = MappingProxyType({})
    costs: Costs = MappingProxyType({})
    space: Space | None = None

    def runs_on(self, device: Device) -> bool:
        """Whether a device has the instructions that this kernel needs."""
        return self.archs is None or device.arch in self.archs

    def smem_bytes(self, v: TemplateArguments) -> int:
        """Return the dynamic shared memory of a block, in bytes."""
        return sum(self.shared_memory(v).values())

    def parameter(self, v: TemplateArguments) -> np.dtype:
        """Return the layout of what a launch passes to an instantiation by value."""
        maps = MAPS if self.tma else None
        return whole(self.params, v.score, kv.PARAMETERS.get(v.kv), maps)

    def _tiles(self, device: Device) -> Tiles:
        newest = max(cc for cc in self.tile_tables if cc <= device.compute_capability)
        return self.tile_tables[newest]

    def head_dims(self, device: Device) -> list[HeadDims]:
        """Return all head dims that are compiled for a device."""
        return list(self._tiles(device))

    def padded(self, device: Device, head_dim: int, head_dim_v: int) -> HeadDims:
        """Return the compiled head dims that hold a problem's."""
        pairs = self._tiles(device)
        return next(pair for pair in pairs if pair[0] >= head_dim and pair[1] >= head_dim_v)

    def tiles(self, device: Device, head_dims: HeadDims) -> tuple[TileShape, ...]:
        """Return the tiles that the planner chooses from for padded head dims."""
        return self._tiles(device)[head_dims]

    def illegal(self, v: TemplateArguments, device: Device) -> str | None:
        """Say why an instantiation cannot run on a device; None if it can."""
        if v.dtype not in self.dtypes:
            return f"{v.kernel} takes {' or '.join(self.dtypes)}, not {v.dtype}"
        for name in SWITCHES:
            if getattr(v, name) and name not in self.arguments:
                return f"{v.kernel} has no {name}"
        if v.schedule and v.schedule not in self.schedules:
            return f"{v.kernel} has no schedule {v.schedule}"
        if len(set(v.score)) < len(v.score):
            return f"a part is twice in the score {v.score}"
        for part in v.score:
            if kind_of(part) not in self.scores:
                return f"{v.kernel} takes {' and '.join(self.scores)} in a score, not {part}"
        if v.kv not in self.kvs:
            return f"{v.kernel} finds K and V by {' or '.join(self.kvs)}, not {v.kv}"
        if not all(isinstance(n, int) and n > 0 for n in (getattr(v, name) for name in NUMBERS)):
            return "template arguments must be positive integers"
        if v.head_dim > self.max_head_dim or v.head_dim_v > self.max_head_dim:
            return f"head dims of more than {self.max_head_dim} are not supported"
        if v.head_dim % self.head_dim_step or v.head_dim_v % self.head_dim_step:
            return f"{v.kernel} needs head dims that are multiples of {self.head_dim_step}"
        if v.bm > MAX_TILE or v.bn > MAX_TILE:
            return f"bm and bn of more than {MAX_TILE} are not supported"
        if not self.runs_on(device):
            return f"{v.kernel} is for {' and '.join(self.archs or ())}, not for {device.arch}"
        complaint = self.complaint(v, device)
        if complaint is not None:
            return complaint
        if v.threads * v.blocks_per_sm > device.threads_per_sm or v.threads > 1024:
            return f"{v.blocks_per_sm} blocks of {v.threads} threads do not fit a multiprocessor"
        smem_bytes = self.smem_bytes(v)
        if smem_bytes > device.smem_per_block:
            needs = f"{smem_bytes} bytes of shared memory are needed"
            return f"{needs}, {device.name} has {device.smem_per_block}"
        registers = self.launch_registers(v) if self.launch_registers else None
        if registers is not None and registers < max(v.bn, v.head_dim_v) // 2 + 30:
            return f"{registers} registers a thread at launch are too few for wgmma of this width"
        return None
