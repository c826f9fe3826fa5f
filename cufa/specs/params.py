"""The parameter of `attention`'s kernels: ``kernels/params.cuh`` and ``kernels/tile_sm90.cuh``."""

from __future__ import annotations

import numpy as np

from cufa.specs.layout import TENSOR

PARAMS = np.dtype(
    [
        *((name, TENSOR) for name in "qkvo"),
        ("lse", "u8"),
        ("workspace", "u8"),
        ("tiles_drawn", "u8"),
        ("scale_log2", "f4"),
        *(
            (name, "i4")
            for name in (
                *("heads_q", "group", "seq_q", "seq_kv", "head_dim", "head_dim_v"),
                *("q_tiles", "heads", "section_heads", "late_rows", "pack_log2"),
            )
        ),
    ],
    align=True,
)
"""The layout of ``Params``."""

MAP_WORDS = 16
"""64-bit words of a tensor map."""

MAPS = np.dtype([(name, "u8", MAP_WORDS) for name in "qkvo"])
"""The layout of ``TensorMaps``."""

MAPS_ALIGNMENT = 64  # bytes
