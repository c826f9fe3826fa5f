"""The parameter that the kernels of the backward pass share, and the spec of a form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.features.parts import kind_of, part_named
from cufa.features.user_functions import BLOCKS, OWN
from cufa.specs import kv
from cufa.specs.instance import Instance, equal_registers
from cufa.specs.params import MAP_WORDS, whole
from cufa.specs.params import PARAMS as FORWARD
from cufa.specs.structs import TENSOR, extended, struct
from cufa.specs.template_arguments import NUMBERS, TemplateArguments
from cufa.specs.tile_shape import TileShape

PARAMS = extended(
    FORWARD,
    (TENSOR, "d_out dq dk dv"),
    ("u8", "row_lse row_delta dq_sums turns turns_drawn kv_sums"),
    *(("u8", "sinks"), ("i8", "stride_sinks"), ("u8", "d_sinks")),
    ("f4", "scale dq_factor"),
    ("i4", "workspace_rows kv_tiles kv_splits split_heads"),
)
"""The layout of ``BackwardParams``."""

MAPPED = ("q", "k", "v", "d_out")
"""The tensors that TMA reads."""

MAPS = struct((("u8", MAP_WORDS), " ".join(MAPPED)))
"""The layout of ``BackwardMaps``."""

ROW_UNIT = 128
"""Rows of the workspace come in multiples of it, as in ``kernels/bwd_params.cuh``."""

TURN_ROWS = 16
"""Rows of the workspace for each counter of turns, as there."""

THREADS = 256
"""Threads of a block of the kernels before and after the products."""

HeadDims = tuple[int, int]
"""Head dims of Q and K, and of V and O."""

Tiles = Mapping[HeadDims, tuple[TileShape, ...]]
"""Tiles by padded head dims: a problem takes the first that hold its own.

The second tile, where there is one, is for scores that take more registers, see
`BackwardSpec.is_large`.
"""

_SLOPES = ("Softcap", "FineSoftcap", "ExactSoftcap", OWN["score_mod"])


def has_slope(score: tuple[str, ...]) -> bool:
    """Whether a part's derivative is not 1."""
    return any(kind_of(part) in _SLOPES for part in score)


def computes(score: tuple[str, ...]) -> bool:
    """Whether a part does more than say which range of keys a query sees, or which tiles."""
    parts = (part_named(name) for name in score if name != BLOCKS)
    return any(not (part.left_edge or part.right_edge) for part in parts)


def parameter(score: tuple[str, ...], way: str, tma: bool = False) -> np.dtype:
    """Return the layout of what a launch passes by value.

    Parameters
    ----------
    score : tuple of str
        The parts of the score.
    way : str
        How Q, K and V are found.
    tma : bool
        Whether tensor maps come first.
    """
    return whole(PARAMS, score, kv.PARAMETERS.get(way), MAPS if tma else None)


def shared_memory(v: TemplateArguments) -> dict[str, int]:
    """Return the dynamic shared memory of a block, in bytes, by what it holds."""
    element = DTYPES[v.dtype].bytes
    return {
        "K": element * v.bn * v.head_dim,
        "V": element * v.bn * v.head_dim_v,
        "Q": element * v.stages * v.bm * v.head_dim,
        "dO": element * v.stages * v.bm * v.head_dim_v,
        "dS": element * v.bm * v.bn,
        "rows": 8 * v.stages * v.bm,
    }


class BackwardSpec(NamedTuple):
    """The facts about one form of the backward kernel that other rooms use.

    Attributes
    ----------
    name : str
        The name of the ``__global__`` function, of its file, and of the file of its spec.
    dtypes : tuple of str
        The element types that it takes.
    tile_tables : mapping
        Tiles by the least compute capability that they are for.
    takes_tile : callable
        Template arguments, all positive -> whether the kernel can share such a tile out among its
        warps.
    shared_memory : callable
        Template arguments -> dynamic shared memory of a block, in bytes, by what it holds.
    archs : tuple of str, optional
        The architectures that it is for; None for all.
    tma : bool
        Whether it reads `MAPPED` through tensor maps: they come first in its parameter.
    copied_rows : int, optional
        Rows of Q and dO that one copy brings; None for those of a tile.
    splits_groups : bool
        Whether several blocks can share the query heads of a tile of keys.
    draws : bool
        Whether its blocks draw tiles of keys until there are none, so that as many blocks are
        launched as multiprocessors hold.
    gradients : tuple of str
        The gradients that it computes.
    differentiates : bool
        Whether it takes scores whose parts have derivatives, and weights that are dropped.
    sums_arrays : bool
        Whether it computes gradients of a bias and of arrays that a `score_mod` reads.
    is_large : callable
        The parts of a score -> whether it takes the second tile.
    tflops : mapping of int to float
        10^12 operations a second on an H200 where all multiprocessors are busy, by padded head dim;
        as far as that is known.
    """

    name: str
    dtypes: tuple[str, ...]
    tile_tables: Mapping[int, Tiles]
    takes_tile: Callable[[TemplateArguments], bool]
    shared_memory: Callable[[TemplateArguments], dict[str, int]] = shared_memory
    archs: tuple[str, ...] | None = None
    tma: bool = False
    copied_rows: int | None = None
    splits_groups: bool = False
    draws: bool = False
    gradients: tuple[str, ...] = ("q", "k", "v")
    differentiates: bool = True
    sums_arrays: bool = True
    is_large: Callable[[tuple[str, ...]], bool] = has_slope
    tflops: Mapping[int, float] = MappingProxyType({})

    def runs_on(self, device: Device) -> bool:
        """Whether a device has the instructions that this kernel needs."""
        return self.archs is None or device.arch in self.archs

    def takes(
        self, dtype: str, head_dims: HeadDims, score: tuple[str, ...], device: Device, maps: bool
    ) -> bool:
        """Whether it computes gradients of a problem.

        Parameters
        ----------
        dtype : str
        head_dims : tuple of int
        score : tuple of str
            The parts of its score.
        device : Device
        maps : bool
            Whether all of `MAPPED` have tensor maps.
        """
        return (
            dtype in self.dtypes
            and self.runs_on(device)
            and (maps or not self.tma)
            and (self.differentiates or not (has_slope(score) or "Dropout" in score))
            and self.padded(device.compute_capability, head_dims) is not None
        )

    @property
    def by_rows(self) -> bool:
        """Whether a block owns rows, and dQ needs no sums in the workspace."""
        return self.gradients == ("q",)

    def padded(self, compute_capability: int, head_dims: HeadDims) -> HeadDims | None:
        """Return the compiled head dims that hold a problem's; None if there are none."""
        d, dv = head_dims
        pairs = self.tiles(compute_capability)
        return next((pair for pair in pairs if pair[0] >= d and pair[1] >= dv), None)

    def instance(self, v: TemplateArguments) -> Instance:
        """Return the instantiation that the compiler takes."""
        numbers = tuple(getattr(v, name) for name in NUMBERS)
        smem_bytes = sum(self.shared_memory(v).values())
        return Instance(
            *(v.kernel, (v.dtype,), numbers, v.score, v.kv, smem_bytes),
            is_dependent=False,
            launch_registers=equal_registers(v.threads) if self.tma else None,
        )

    def tiles(self, compute_capability: int) -> Tiles:
        """Return the tiles of a device; none if it is too old."""
        newest = max((cc for cc in self.tile_tables if cc <= compute_capability), default=0)
        return self.tile_tables.get(newest, {})

    def rate(self, head_dim: int) -> float | None:
        """Return the speed of a head dim: that of the first one known that holds it, or None."""
        first = min((d for d in self.tflops if d >= head_dim), default=None)
        return None if first is None else self.tflops[first]


def around(kernel: str, v: TemplateArguments, *more: int, smem_bytes: int = 0) -> Instance:
    """Return a kernel before or after the products; it is the same for all scores.

    Parameters
    ----------
    kernel : str
    v : TemplateArguments
        The arguments of the products.
    *more : int
        Its own numbers behind the head dim.
    smem_bytes : int
    """
    numbers = v.head_dim, *more
    return Instance(kernel, (v.dtype,), numbers, (), v.kv, smem_bytes, is_dependent=False)
