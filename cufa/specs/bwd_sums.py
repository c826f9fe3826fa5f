"""After the products of the backward pass: the gradient of an array from its sums."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec

SPEC = AuxiliarySpec.of(
    "bwd_sums",
    ("u8", "sums gradient"),
    ("i8", "elements"),
    ("i4", "batch heads queries keys sums_batch sums_heads sums_queries sums_keys lanes"),
)
