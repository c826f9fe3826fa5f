"""After the products of the backward pass: the sum of parts of dK and dV."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS

SPEC = AuxiliarySpec("bwd_join", PARAMS, threads=256, moved=("kv_sums", "dk", "dv"))
