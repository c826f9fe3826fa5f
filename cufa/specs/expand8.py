"""Keys or values of a cache of 8 bits as arrays of another dtype."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.structs import TENSOR

CHUNK = 16
"""Columns that a thread expands."""

SPEC = AuxiliarySpec.of(
    "expand8",
    (TENSOR, "values scales mean out"),
    ("u8", "table"),
    ("i8", "table_stride"),
    ("i4", "heads seq chunks dim page_size pages"),
)
