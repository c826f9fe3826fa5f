"""The kernel that puts the log-sum-exp of queries right where a mean was taken off keys."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.structs import TENSOR

SPEC = AuxiliarySpec.of(
    "lse_mean",
    (TENSOR, "q mean"),
    ("u8", "lse"),
    ("f4", "scale"),
    ("i4", "heads seq head_dim group rows"),
)
