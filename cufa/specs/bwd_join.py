"""After the products of the backward pass: the sum of parts of dK and dV."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS, THREADS

SPEC = AuxiliarySpec(
    "bwd_join",
    params=PARAMS,
    inputs=("kv_sums",),
    outputs=("dk", "dv"),
    threads=THREADS,
    types=("t",),
    numbers=("head_dim", "bn"),
    takes_score=True,
)
