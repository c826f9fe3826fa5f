"""After the products of the backward pass: dQ from its sums."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS

SPEC = AuxiliarySpec("bwd_finish", PARAMS, threads=256, moved=("dq_sums", "dq"))
