"""Keys or values of a cache of 8 bits as arrays of another dtype."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.structs import TENSOR, struct

CHUNK = 16
"""Columns that a thread expands."""

SPEC = AuxiliarySpec(
    "expand8",
    struct(
        (TENSOR, "values scales mean out"),
        ("u8", "table"),
        ("i8", "table_stride"),
        ("i4", "heads seq chunks dim page_size pages"),
    ),
    threads=128,
)

LSE_MEAN = AuxiliarySpec(
    "lse_mean",
    struct(
        (TENSOR, "q mean"), ("u8", "lse"), ("f4", "scale"), ("i4", "heads seq head_dim group rows")
    ),
    threads=128,
)
"""Puts the log-sum-exp of queries right where a mean was taken off keys."""
