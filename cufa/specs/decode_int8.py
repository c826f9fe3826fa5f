"""Few queries and many keys of 8-bit integers, on tensor cores."""

from __future__ import annotations

from cufa.specs import decode_scaled

SPEC = decode_scaled.spec("decode_int8", kv_dtype="int8")
