"""Spec: what the rest of the package knows of a kernel that computes attention; rings, spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cufa.device import Device
from cufa.features.parts import PARTS, kind_of
from cufa.features.user_functions import OWN
from cufa.specs.costs import Cost
from cufa.specs.kernel_spec import KernelSpec, TileShape
from cufa.specs.params import MAPS, PARAMS, whole
from cufa.specs.template_arguments import SWITCHES, TemplateArguments

MAX_TILE = 256
"""Rows and columns of a tile at most: lengths are rounded up to it in 32 bits."""

MAX_HEAD_DIM = 256
"""The most that a head dim can be."""

Costs = Mapping[tuple[int, int, bool], Mapping[TileShape, Cost]]
"""Measured costs of tiles, by padded head dims and whether scores have an edge."""


class Ring(NamedTuple):
    """How a block that has a multiprocessor for itself holds keys.

    Attributes
    ----------
    bn, stages : int
        Keys of a tile, and tiles of a ring.
    warps : int
        Warps of the block.
    team : int
        How many of its warps share a ring.
    """

    bn: int
    stages: int
    warps: int
    team: int

    @property
    def keys(self) -> int:
        """How many all rings hold, and ask for at a time."""
        return self.bn * self.stages * self.warps // self.team


class Space(NamedTuple):
    """The default space of one kernel. Causal is the problem's, head dims are the planner's.

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
    registers: Callable[[TemplateArguments], float]
    ping_pong: tuple[bool, ...] = (False,)


def output(v: TemplateArguments) -> float:
    """Return how many accumulators of the output a thread holds."""
    return v.bm * v.head_dim_v / v.threads


def scores(v: TemplateArguments) -> float:
    """Return how many scores of a tile a thread holds."""
    return v.bm * v.bn / v.threads


@dataclass(frozen=True, eq=False, kw_only=True)
class Spec(KernelSpec):
    """A kernel that computes attention, as the rest of the package knows it.

    Attributes
    ----------
    complaint : callable
        Template arguments and Device -> why it cannot run, as far as the kernel's own rules say,
        or None.
    params : dtype
        The struct that its parameter begins with, but for tensor maps.
    head_dim_step : int
        Head dims are compiled in multiples of it.
    needs_keys : bool
        Whether it cannot run without any.
    flops_per_byte : int
        Floating-point operations of a busy multiprocessor in the time in which it could read a byte
        of global memory, as measured on an H200; for kernels of `attention`.
    scores, kvs : tuple of str
        The parts of a score, and the ways of finding K and V, that it takes.
    kv_dtype : str, optional
        The dtype of K and V if they have 8 bits and scales; else it is that of Q.
    spare_registers : callable, optional
        Template arguments -> how many a thread of those that compute has besides its S, P and O,
        where it has not as many as it may ask for.
    rings : mapping of int to tuple of Ring
        Rings that the planner chooses from, by the rows of a tile; only of kernels that decode.
    costs : Costs
    space : Space, optional
        The explorer's; None for kernels that decode.
    """

    complaint: Callable[[TemplateArguments, Device], str | None]
    params: np.dtype = PARAMS
    head_dim_step: int = 16
    needs_keys: bool = False
    flops_per_byte: int = 1
    scores: tuple[str, ...] = (*PARTS, *OWN.values())
    kvs: tuple[str, ...] = ("Dense",)
    kv_dtype: str | None = None
    spare_registers: Callable[[TemplateArguments], int] | None = None
    rings: Mapping[int, tuple[Ring, ...]] = field(default_factory=dict)
    costs: Costs = field(default_factory=dict)
    space: Space | None = None

    def parameter(self, v: TemplateArguments) -> np.dtype:
        """Return the layout of what a launch passes to an instantiation by value."""
        return whole(self.params, v.score, v.kv, MAPS if self.tma else None)

    def illegal(self, v: TemplateArguments, device: Device) -> str | None:
        """Say why an instantiation cannot run on a device; None if it can."""
        complaint = super().illegal(v, device)
        if complaint is not None:
            return complaint
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
        if max(v.head_dim, v.head_dim_v) > MAX_HEAD_DIM:
            return f"head dims of more than {MAX_HEAD_DIM} are not supported"
        if v.head_dim % self.head_dim_step or v.head_dim_v % self.head_dim_step:
            return f"{v.kernel} needs head dims that are multiples of {self.head_dim_step}"
        if v.bm > MAX_TILE or v.bn > MAX_TILE:
            return f"bm and bn of more than {MAX_TILE} are not supported"
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
