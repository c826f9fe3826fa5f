"""The parameter that the kernels of the backward pass share, and the spec of a form."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cufa.dtypes import DTYPES
from cufa.specs import kv
from cufa.specs.arguments import NUMBERS, TemplateArguments
from cufa.specs.instance import Instance
from cufa.specs.layout import TENSOR, of_parts, structure
from cufa.specs.params import PARAMS as FORWARD
from cufa.specs.tile_shape import TileShape

PARAMS = np.dtype(
    [
        *((name, FORWARD[name]) for name in FORWARD.names or ()),
        *((name, TENSOR) for name in ("d_out", "dq", "dk", "dv")),
        *((name, "u8") for name in ("row_lse", "row_delta", "dq_sums", "turns", "turns_drawn")),
        *(("sinks", "u8"), ("stride_sinks", "i8"), ("d_sinks", "u8")),
        *((name, "f4") for name in ("scale", "dq_factor")),
        *((name, "i4") for name in ("workspace_rows", "kv_tiles")),
    ],
    align=True,
)
"""The layout of ``BackwardParams``."""

ROW_UNIT = 64
"""Rows of the workspace come in multiples of it, as in ``kernels/bwd_params.cuh``."""

TURN_ROWS = 16
"""Rows of the workspace that share a turn."""

THREADS = 128
"""Threads of a block of the kernels before and after the products."""

HeadDims = tuple[int, int]
"""Those of Q and K, and of V and O."""

Tiles = Mapping[HeadDims, tuple[TileShape, ...]]
"""By padded head dims, of which a problem takes the first that hold its own.

The second tile, where there is one, is for scores whose parts have derivatives: these take as many
registers as the scores of a tile.
"""


def parameter(score: tuple[str, ...], way: str) -> np.dtype:
    """Return the layout of what a launch passes by value.

    Parameters
    ----------
    score : tuple of str
        The parts of the score.
    way : str
        How Q, K and V are found.
    """
    fields = [("params", PARAMS), *of_parts(score)]
    if way in kv.PARAMETERS:
        fields.append(("kv", kv.PARAMETERS[way]))
    return structure(fields)


class BackwardSpec(NamedTuple):
    """The facts about one form of the backward kernel that other rooms use.

    Attributes
    ----------
    name : str
        The name of the ``__global__`` function, of its file, and of the file of its spec.
    dtypes : tuple of str
        The element types that it takes.
    tile_tables : mapping
        By the compute capability from which on they hold.
    tflops : mapping of int to float
        10^12 operations a second on an H200 where all multiprocessors are busy, by padded head dim;
        as far as that is known.
    """

    name: str
    dtypes: tuple[str, ...]
    tile_tables: Mapping[int, Tiles]
    tflops: Mapping[int, float] = MappingProxyType({})

    def tiles(self, compute_capability: int) -> Tiles:
        """Return the tiles of a device."""
        newest = max(cc for cc in self.tile_tables if cc <= compute_capability)
        return self.tile_tables[newest]

    def rate(self, head_dim: int) -> float | None:
        """Return the speed of a head dim: that of the first one known that holds it, or None."""
        first = min((d for d in self.tflops if d >= head_dim), default=None)
        return None if first is None else self.tflops[first]


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


def instance_of(v: TemplateArguments) -> Instance:
    """Return the instantiation that the compiler takes."""
    numbers = tuple(getattr(v, name) for name in NUMBERS)
    smem_bytes = sum(shared_memory(v).values())
    return Instance(v.kernel, (v.dtype,), numbers, v.score, v.kv, smem_bytes, is_dependent=False)


def around(kernel: str, v: TemplateArguments, smem_bytes: int = 0) -> Instance:
    """Return a kernel before or after the products; it is the same for all scores."""
    return Instance(kernel, (v.dtype,), (v.head_dim,), (), v.kv, smem_bytes, is_dependent=False)
