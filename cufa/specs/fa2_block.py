"""The base of the kernels of FlashAttention-2: 16 rows a warp, or several times 16."""

from __future__ import annotations

from cufa.dtypes import DTYPES
from cufa.specs.template_arguments import TemplateArguments


def shared_memory(v: TemplateArguments, row_warps: int) -> dict[str, int]:
    """Return the bytes that a block holds, if `row_warps` of its warps share the rows."""
    element = DTYPES[v.dtype].bytes
    return {
        "Q": element * v.bm * v.head_dim,
        "K": element * v.stages * v.bn * v.head_dim,
        "V": element * v.stages * v.bn * v.head_dim_v,
        "key ranges": 16 * (v.bm // 16) * (v.warps // row_warps),  # of each warp's 16 rows
        "tile": 16 * (v.kv == "Varlen"),  # which one it is
    }


def complaint(v: TemplateArguments, row_warps: int) -> str | None:
    """Say why a block cannot run if `row_warps` of its warps share the rows, or return None."""
    if v.warps % 2:
        return "warps must be even: a thread copies rows in steps of 8"
    if v.bm % (16 * row_warps) or v.bn % 16:
        return f"bm must be a multiple of {16 * row_warps}, and bn of 16"
    return None
