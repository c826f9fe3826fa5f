"""Which tiles of queries and keys a caller's own mask hides."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.structs import struct

SPEC = AuxiliarySpec(
    "block_mask",
    struct(("u8", "kinds"), ("i4", "heads rows columns tiles seq_q seq_kv queries keys")),
    threads=128,
)
