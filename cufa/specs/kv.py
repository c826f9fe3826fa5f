"""The parameters of the ways of finding K and V: ``kernels/kv.cuh`` and ``kernels/paged.cuh``."""

from __future__ import annotations

import numpy as np

from cufa.features.part import Parameter

LENGTHS = {
    "Padded": tuple(Parameter(name, "u8") for name in ("lengths_k", "lengths_q")),
    "Varlen": (
        *(Parameter(name, "u8") for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")),
        *(Parameter(name, "i4") for name in ("sequences", "max_seqlen_q", "max_seqlen_k")),
    ),
}
"""Those where sequences differ in length; 64 bits are the address of an array of that name."""

DIVISOR = [("multiplier", "u4"), ("shift", "i4"), ("divisor", "i4")]
"""The fields of ``Divisor`` in ``kernels/divisor.cuh``."""

PAGED = np.dtype(
    [("block_table", "u8"), ("table_stride", "i4"), ("pages", "i4"), ("page_size", DIVISOR)],
    align=True,
)
"""The layout of ``Paged``."""

PAGES = ("Paged", "PagedSixteens", "PagedTiles")
"""The ways of finding them in pages."""

PARAMETERS: dict[str, np.dtype] = {
    **{name: np.dtype(list(numbers), align=True) for name, numbers in LENGTHS.items()},
    **dict.fromkeys(PAGES, PAGED),
}
"""The layouts of those that have parameters, by name."""
