"""Which tiles of queries and keys a caller's own mask hides."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.structs import struct

SPEC = AuxiliarySpec(
    "block_mask",
    params=struct(("u8", "kinds"), ("i4", "heads rows columns tiles seq_q seq_kv queries keys")),
    inputs=(),  # but for those of the mask
    outputs=("kinds",),
    threads=128,
    takes_mask=True,
)
