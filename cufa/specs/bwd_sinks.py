"""The gradients of sinks, from sums over rows."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS

SPEC = AuxiliarySpec(
    "bwd_sinks",
    params=PARAMS,
    inputs=("sinks", "row_lse", "row_delta"),
    outputs=("d_sinks",),
    threads=256,
    types=("t",),
    numbers=("head_dim",),
    takes_score=True,
)
