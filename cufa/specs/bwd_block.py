"""Which tiles ``kernels/bwd_block.cuh`` takes, for bwd_mma and bwd_fp32."""

from __future__ import annotations

from cufa.specs.backward import ROW_UNIT
from cufa.specs.template_arguments import TemplateArguments


def takes_tile(v: TemplateArguments, shares_from: int, least_columns: int) -> bool:
    """Whether the warps of a block share its keys, and its tile of dQ, in whole steps.

    ``kernels/bwd_block.cuh`` asserts it.

    Parameters
    ----------
    v : TemplateArguments
    shares_from : int
        Columns of K and V together beyond which two warps share keys.
    least_columns : int
        Columns of dQ that a warp computes at least.
    """
    warps = v.warps // 2 if v.head_dim + v.head_dim_v > shares_from else v.warps
    # An odd number of warps would copy rows whose swizzles differ.
    if v.warps % 2 or v.bn % (16 * warps) or v.bm % 16 or ROW_UNIT % v.bm or v.stages > 2:
        return False
    row_parts = min(v.bm // 16, warps)
    return warps % row_parts == 0 and v.head_dim % (warps // row_parts * least_columns) == 0
