"""Which tiles of queries and keys a caller's own mask hides."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.structs import struct

SPEC = AuxiliarySpec(
    "block_mask",
    struct(("u8", "kinds"), ("i4", "heads rows columns tiles seq_q seq_kv queries keys")),
    threads=128,
)

LISTS = AuxiliarySpec(
    "block_lists",
    struct(
        ("u8", "kinds lists"),
        ("i4", "kind_rows kind_columns queries keys rows columns bm bn lines seq_q seq_kv"),
    ),
    threads=128,
)
"""Which tiles of keys each tile of rows visits, from the kinds of a mask's own tiles."""
