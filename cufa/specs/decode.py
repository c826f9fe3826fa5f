"""Few queries and many keys, on tensor cores, and in float32."""

from __future__ import annotations

from cufa.device import Device
from cufa.specs import decode_block
from cufa.specs.template_arguments import NUMBERS, TemplateArguments

_LARGE = ((64, 1, 8), (32, 2, 8), (32, 1, 8))
_OF_TWO = ((32, 2, 8), (16, 2, 8), (16, 2, 4))


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    return decode_block.shared_memory(v, decode_block.team(v.bm))


def _complaint(v: TemplateArguments, device: Device) -> str | None:
    if v.bm not in (16, 32, 64) or v.bn % 16:
        return "bm must be 16, 32 or 64, and bn a multiple of 16"
    complaint = decode_block.complaint(v, decode_block.team(v.bm))
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
    shared_memory=_shared_memory,
    complaint=_complaint,
    arguments=(*NUMBERS, "unified", "whole"),
    rings=decode_block.rings(
        {16: (*_LARGE, *decode_block.SMALL), 32: (*_OF_TWO, (16, 3, 8)), 64: _OF_TWO}
    ),
)
