"""The base of the kernels that decode over K and V of 8 bits with scales."""

from __future__ import annotations

import functools

from cufa.device import Device
from cufa.specs import decode_block
from cufa.specs.decode_block import SMALL, rings
from cufa.specs.structs import TENSOR, extended
from cufa.specs.template_arguments import NUMBERS, TemplateArguments

PARAMS = extended(decode_block.PARAMS, (TENSOR, "k_scale v_scale"))
"""The layout of ``ScaledParams`` in ``kernels/decode_params.cuh``."""

shared_memory = functools.partial(decode_block.shared_memory, scaled=True)


def _complaint(v: TemplateArguments, device: Device) -> str | None:
    if v.bm not in (16, 32, 64) or v.bn not in (16, 32, 64, 128):  # threads share out rows evenly
        return "bm must be 16, 32 or 64, and bn 16, 32, 64 or 128"
    return decode_block.complaint(v)


spec = functools.partial(
    decode_block.spec,
    dtypes=("float16", "bfloat16"),
    complaint=_complaint,
    params=PARAMS,
    arguments=(*NUMBERS, "whole"),
    rings={
        16: rings((64, 2, 8), (32, 2, 8), *SMALL, team=1),
        32: rings((32, 3, 8), (32, 2, 8), (16, 3, 8), (16, 2, 8), (16, 2, 4), team=2),
        64: rings((16, 4, 8), (16, 2, 8), (16, 2, 4), team=2),  # with 32 keys registers spill
    },
)
