"""Clears the rows of packed arrays that no sequence has."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec

ROWS = 32
"""Rows that a block checks."""

SPEC = AuxiliarySpec.of(
    "clear_rows",
    ("u8", "out lse cu_seqlens used"),
    ("i8", "row_words"),
    ("i4", "rows heads sequences max_seqlen"),
)
