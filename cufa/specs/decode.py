"""Few queries and many keys, on tensor cores, and in float32."""

from __future__ import annotations

from cufa.device import Device
from cufa.specs import decode_block
from cufa.specs.decode_block import SMALL, rings
from cufa.specs.template_arguments import NUMBERS, TemplateArguments

_OF_TWO = ((32, 2, 8), (16, 2, 8), (16, 2, 4))


def _complaint(v: TemplateArguments, device: Device) -> str | None:
    if v.bm not in (16, 32, 64) or v.bn % 16:
        return "bm must be 16, 32 or 64, and bn a multiple of 16"
    complaint = decode_block.complaint(v)
    if complaint is not None:
        return complaint
    if v.dtype == "float32" and v.bm != 16:
        return "in float32, decode needs bm of 16"
    if v.unified and (v.dtype == "float32" or v.bm > 16):
        return "unified is for 16 bits, and bm of 16"
    return None


SPEC = decode_block.spec(
    name="decode",
    dtypes=("float16", "bfloat16", "float32"),
    complaint=_complaint,
    arguments=(*NUMBERS, "unified", "whole"),
    rings={
        16: rings((64, 1, 8), (32, 2, 8), (32, 1, 8), *SMALL, team=1),
        32: rings(*_OF_TWO, (16, 3, 8), team=2),
        64: rings(*_OF_TWO, team=2),
    },
)
