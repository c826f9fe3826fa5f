"""Clears the rows of a result that no sequence has."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.structs import struct

ROWS = 32
"""Rows that a block checks."""

SPEC = AuxiliarySpec(
    "clear_rows",
    params=struct(
        ("u8", "out lse cu_seqlens_q"),
        ("i8", "row_words"),
        ("i4", "rows heads sequences max_seqlen_q"),
    ),
    inputs=("cu_seqlens_q",),
    outputs=("out", "lse"),
    threads=128,
    numbers=("vec",),
)
