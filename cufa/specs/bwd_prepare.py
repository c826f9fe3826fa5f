"""Before the products of the backward pass: sums over rows."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS, THREADS

SPEC = AuxiliarySpec(
    "bwd_prepare",
    params=PARAMS,
    inputs=("o", "d_out", "lse"),
    outputs=("row_lse", "row_delta", "dq_sums", "turns", "turns_drawn"),
    threads=THREADS,
    types=("t",),
    numbers=("head_dim",),
    takes_score=True,
)
