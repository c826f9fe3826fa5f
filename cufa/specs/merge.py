"""Attention over a set of keys from attention over its parts."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.structs import struct

MAX_PARTS = 128
"""Parts whose addresses fit into the parameter, of 4 KiB at most; memory has those of others."""

PART = struct(("u8", "out lse"))
"""The layout of ``Part``."""

_STRIDES = struct(("i8", "batch head seq"))

SPEC = AuxiliarySpec.of(
    "merge",
    ("u8", "out lse"),
    (_STRIDES, "of_out of_parts of_part_lses"),
    ("i4", "rows heads seq head_dim parts"),
    ((PART, MAX_PARTS), "part"),
    ("u8", "others"),
    threads=256,
)
