"""Few queries and many keys of 8-bit integers, on tensor cores."""

from __future__ import annotations

from cufa.specs import decode_scaled
from cufa.specs.template_arguments import TemplateArguments


def _shared_memory(v: TemplateArguments) -> dict[str, int]:
    parts = decode_scaled.shared_memory(v)
    of_three_bytes = v.bm * v.head_dim if v.bm == 16 else 0
    return {**parts, "Q": parts["Q"] + of_three_bytes}


SPEC = decode_scaled.spec(name="decode_int8", kv_dtype="int8", shared_memory=_shared_memory)
