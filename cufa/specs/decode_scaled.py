"""The base of the kernels that decode over K and V of 8 bits with scales."""

from __future__ import annotations

from cufa.device import Device
from cufa.specs import decode_block
from cufa.specs.spec import Spec
from cufa.specs.structs import TENSOR, extended
from cufa.specs.template_arguments import NUMBERS, TemplateArguments

PARAMS = extended(decode_block.PARAMS, (TENSOR, "k_scale v_scale"))
"""The layout of ``ScaledParams`` in ``kernels/decode_params.cuh``."""

_LARGE = ((64, 2, 8), (32, 2, 8))
_OF_TWO = ((32, 3, 8), (32, 2, 8), (16, 3, 8), (16, 2, 8), (16, 2, 4))
_OF_64_ROWS = ((16, 4, 8), (16, 2, 8), (16, 2, 4))  # with 32 keys registers spill


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    return decode_block.shared_memory(v, decode_block.team(v.bm), scaled=True)


def _shared_memory_of_integers(v: TemplateArguments) -> dict[str, int]:
    parts = _shared_memory(v)
    of_three_bytes = v.bm * v.head_dim if v.bm == 16 else 0
    return {**parts, "Q": parts["Q"] + of_three_bytes}


def _complaint(v: TemplateArguments, device: Device) -> str | None:
    if v.bm not in (16, 32, 64) or v.bn not in (16, 32, 64, 128):  # threads share out rows evenly
        return "bm must be 16, 32 or 64, and bn 16, 32, 64 or 128"
    return decode_block.complaint(v, decode_block.team(v.bm))


def spec(name: str, kv_dtype: str) -> Spec:
    """Return the spec of a kernel by the dtype of K and V."""
    return decode_block.spec(
        name=name,
        dtypes=("float16", "bfloat16"),
        kv_dtype=kv_dtype,
        shared_memory=_shared_memory_of_integers if kv_dtype == "int8" else _shared_memory,
        complaint=_complaint,
        params=PARAMS,
        arguments=(*NUMBERS, "whole"),
        rings=decode_block.rings(
            {16: (*_LARGE, *decode_block.SMALL), 32: _OF_TWO, 64: _OF_64_ROWS}
        ),
    )
