"""Which tiles of keys each tile of rows visits, from the kinds of a mask's own tiles."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec

SPEC = AuxiliarySpec.of(
    "block_lists",
    ("u8", "kinds lists"),
    ("i4", "kind_rows kind_columns queries keys rows columns bm bn lines seq_q seq_kv"),
)
