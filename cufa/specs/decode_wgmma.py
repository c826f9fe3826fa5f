"""Some 64 queries and many keys, on Hopper's tensor cores: a warpgroup shares a ring."""

from __future__ import annotations

import functools

from cufa.device import Device
from cufa.specs import decode_block
from cufa.specs.decode_block import rings
from cufa.specs.template_arguments import NUMBERS, TemplateArguments

_TEAM = 4  # warps


def _complaint(v: TemplateArguments, device: Device) -> str | None:
    if v.bm != 64 or v.bn not in (32, 64, 128):
        return "bm must be 64, and bn 32, 64 or 128"
    return decode_block.complaint(v, _TEAM)


SPEC = decode_block.spec(
    name="decode_wgmma",
    dtypes=("float16", "bfloat16"),
    shared_memory=functools.partial(decode_block.shared_memory, team=_TEAM),
    complaint=_complaint,
    arguments=(*NUMBERS, "whole"),
    archs=("sm_90a",),
    rings={64: rings((64, 2, 16), (64, 3, 8), (64, 2, 8), (32, 2, 8), team=_TEAM)},
)
