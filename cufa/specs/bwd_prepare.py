"""Before the products of the backward pass: sums over rows."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS

SPEC = AuxiliarySpec(
    "bwd_prepare",
    PARAMS,
    threads=256,
    moved=("o", "d_out", "lse", "row_lse", "row_delta", "dq_sums"),
)
