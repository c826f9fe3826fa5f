"""Which tiles of queries and keys a caller's own mask hides."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec

SPEC = AuxiliarySpec.of(
    "block_mask", ("u8", "kinds"), ("i4", "heads rows columns tiles seq_q seq_kv queries keys")
)
