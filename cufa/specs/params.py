"""The parameter of `attention`'s kernels: ``kernels/params.cuh`` and ``kernels/tile_sm90.cuh``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cufa.specs.kv import PARAMETERS
from cufa.specs.structs import TENSOR, of_parts, struct, structure

PARAMS = struct(
    (TENSOR, "q k v o"),
    ("u8", "lse workspace tiles_drawn"),
    ("f4", "scale_log2"),
    ("i4", "heads_q group seq_q seq_kv head_dim head_dim_v"),
    ("i4", "q_tiles heads section_heads late_rows pack_log2"),
)
"""The layout of ``Params``."""

MAP_WORDS = 16
"""64-bit words of a tensor map."""

MAPS = struct((("u8", MAP_WORDS), "q k v o"))
"""The layout of ``TensorMaps``."""

MAPS_ALIGNMENT = 64  # bytes


def whole(
    params: np.dtype,
    score: Sequence[str],
    kv: str | np.dtype = "Dense",
    maps: np.dtype | None = None,
) -> np.dtype:
    """Return the layout of what a launch passes by value, ``Arguments`` of ``score.cuh``.

    Parameters
    ----------
    params : dtype
        The field `params`.
    score : sequence of str
        The parts of the score; those that have parameters have a field.
    kv : str or dtype
        The way of finding Q, K and V, which has a field if it has parameters; or that field.
    maps : dtype, optional
        The field `maps`, of kernels that use TMA, which comes first: ``TmaArguments`` of
        ``tile_sm90.cuh``.
    """
    fields = [("params", params), *of_parts(score)]
    way = PARAMETERS.get(kv) if isinstance(kv, str) else kv
    if way is not None:
        fields.append(("kv", way))
    if maps is None:
        return structure(fields)
    return structure([("maps", maps), *fields], MAPS_ALIGNMENT)
