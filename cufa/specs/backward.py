"""The parameter that the kernels of the backward pass share, and the spec of a form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.features.parts import kind_of, part_named
from cufa.features.user_functions import BLOCKS, OWN
from cufa.specs.kernel_spec import HeadDims, KernelSpec
from cufa.specs.params import MAP_WORDS, whole
from cufa.specs.params import PARAMS as FORWARD
from cufa.specs.structs import TENSOR, extended, struct
from cufa.specs.template_arguments import TemplateArguments, equal_registers

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

_RESERVED = 1024  # bytes of shared memory that CUDA takes for each block
_MOST_THREADS = 1024  # of a block

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
    return whole(PARAMS, score, way, MAPS if tma else None)


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


@dataclass(frozen=True, eq=False, kw_only=True)
class BackwardSpec(KernelSpec):
    """A kernel that computes products of gradients, as the rest of the package knows it.

    Through tensor maps it reads `MAPPED`.

    Attributes
    ----------
    takes_tile : callable
        Template arguments, all positive -> whether the kernel can share such a tile out among its
        warps.
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
        10^12 operations a second on an H200 where all multiprocessors are busy, by padded head dim.
    """

    shared_memory: Callable[[TemplateArguments], dict[str, int]] = shared_memory
    takes_tile: Callable[[TemplateArguments], bool]
    copied_rows: int | None = None
    splits_groups: bool = False
    draws: bool = False
    gradients: tuple[str, ...] = ("q", "k", "v")
    differentiates: bool = True
    sums_arrays: bool = True
    is_large: Callable[[tuple[str, ...]], bool] = has_slope
    tflops: Mapping[int, float]

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
        d, dv = head_dims
        return (
            dtype in self.dtypes
            and self.runs_on(device)
            and (maps or not self.tma)
            and (self.differentiates or not (has_slope(score) or "Dropout" in score))
            and any(pair[0] >= d and pair[1] >= dv for pair in self.head_dims(device))
        )

    @property
    def by_rows(self) -> bool:
        """Whether a block owns rows, and dQ needs no sums in the workspace."""
        return self.gradients == ("q",)

    def rate(self, head_dim: int) -> float:
        """Return the speed of a head dim: that of the first one known that holds it."""
        return self.tflops[min(d for d in self.tflops if d >= head_dim)]

    def illegal(self, v: TemplateArguments, device: Device) -> str | None:
        """Say why an instantiation cannot run on a device; None if it can."""
        complaint = super().illegal(v, device)
        if complaint is not None:
            return complaint
        smem_bytes, blocks = self.smem_bytes(v), v.blocks_per_sm
        if smem_bytes > device.smem_per_block:
            return (
                f"{smem_bytes} bytes of shared memory are needed, {device.name} has "
                f"{device.smem_per_block} for a block"
            )
        if blocks * (smem_bytes + _RESERVED) > device.smem_per_sm:
            return f"{blocks} blocks do not fit in {device.smem_per_sm} bytes of shared memory"
        if blocks * v.threads > device.threads_per_sm:
            return f"{blocks} blocks have more than {device.threads_per_sm} threads"
        if v.threads > _MOST_THREADS or not self.takes_tile(v):
            return f"{self.name} takes no such tile"
        return None


hopper_spec = functools.partial(
    BackwardSpec,
    dtypes=("float16", "bfloat16"),
    archs=("sm_90a",),
    tma=True,
    launch_registers=lambda v: equal_registers(v.threads),
    sums_arrays=False,
)
"""The spec of a kernel for Hopper; give the rest."""
