"""The parameters of the ways of finding K and V: ``kernels/kv.cuh`` and ``kernels/paged.cuh``."""

from __future__ import annotations

import numpy as np

from cufa.features.part import Parameter
from cufa.specs.structs import struct

LENGTHS = {
    "Padded": tuple(Parameter(name, "u8") for name in ("lengths_k", "lengths_q")),
    "Varlen": (
        *(Parameter(name, "u8") for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")),
        *(Parameter(name, "i4") for name in ("sequences", "max_seqlen_q", "max_seqlen_k")),
    ),
}
"""Kinds of K and V where sequences differ in length; 64 bits are the address of that array."""

DIVISOR = [("multiplier", "u4"), ("shift", "i4"), ("divisor", "i4")]
"""The fields of ``Divisor`` in ``kernels/divisor.cuh``."""

PAGED = struct(("u8", "block_table"), ("i4", "table_stride pages"), (DIVISOR, "page_size"))
"""The layout of ``Paged``."""

PAGES = ("Paged", "PagedSixteens", "PagedTiles")
"""The ways of finding them in pages."""


def in_cache(page_size: int, bn: int) -> str:
    """Return how tiles of `bn` keys are found in pages of a size, or in no pages, if that is 0."""
    if page_size == 0:
        return "Contiguous"
    return "PagedTiles" if page_size % bn == 0 else "Paged" if page_size % 16 else "PagedSixteens"


PARAMETERS: dict[str, np.dtype] = {
    **{name: np.dtype(list(numbers), align=True) for name, numbers in LENGTHS.items()},
    **dict.fromkeys(PAGES, PAGED),
}
"""The layouts of those that have parameters, by name."""
