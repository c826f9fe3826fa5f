"""Some 64 queries and many keys, on Hopper's tensor cores: a warpgroup shares a ring."""

from __future__ import annotations

from cufa.device import Device
from cufa.specs import decode_block
from cufa.specs.rings import Ring
from cufa.specs.template_arguments import NUMBERS, TemplateArguments

_TEAM = 4  # warps
_SHAPES = ((64, 2, 16), (64, 3, 8), (64, 2, 8), (32, 2, 8))


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    return decode_block.shared_memory(v, _TEAM)


def _complaint(v: TemplateArguments, device: Device) -> str | None:
    if v.bm != 64 or v.bn not in (32, 64, 128):
        return "bm must be 64, and bn 32, 64 or 128"
    return decode_block.complaint(v, _TEAM)


SPEC = decode_block.spec(
    name="decode_wgmma",
    dtypes=("float16", "bfloat16"),
    shared_memory=_shared_memory,
    complaint=_complaint,
    arguments=(*NUMBERS, "whole"),
    archs=("sm_90a",),
    rings={64: tuple(Ring(*shape, _TEAM) for shape in _SHAPES)},
)
