"""The parameters of the ways of finding K and V: ``kernels/kv.cuh`` and ``kernels/paged.cuh``."""

from __future__ import annotations

import numpy as np

from cufa.specs.structs import struct

LENGTHS = {
    "Padded": struct(("u8", "lengths_k lengths_q")),
    "Varlen": struct(
        ("u8", "cu_seqlens_q cu_seqlens_k seqused_k"), ("i4", "sequences max_seqlen_q max_seqlen_k")
    ),
}
"""The layouts of those where sequences differ in length; 64 bits are the address of that array."""

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


PARAMETERS: dict[str, np.dtype] = {**LENGTHS, **dict.fromkeys(PAGES, PAGED)}
"""The layouts of those that have parameters, by name."""
