"""The parameter of `attention`'s kernels: ``kernels/params.cuh`` and ``kernels/tile_sm90.cuh``."""

from __future__ import annotations

from cufa.specs.structs import TENSOR, struct

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
