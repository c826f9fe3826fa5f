"""After the products of the backward pass: dQ from its sums."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS, THREADS

SPEC = AuxiliarySpec(
    "bwd_finish",
    params=PARAMS,
    inputs=("dq_sums",),
    outputs=("dq",),
    threads=THREADS,
    types=("t",),
    numbers=("head_dim", "quads"),
    takes_score=True,
)
