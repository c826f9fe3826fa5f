"""Few queries and many keys of 8-bit floating point, on tensor cores."""

from __future__ import annotations

from cufa.specs import decode_scaled

SPEC = decode_scaled.spec(
    name="decode_fp8", kv_dtype="float8_e4m3fn", shared_memory=decode_scaled.shared_memory
)
