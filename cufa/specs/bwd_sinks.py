"""The gradients of sinks, from sums over rows."""

from __future__ import annotations

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.backward import PARAMS

SPEC = AuxiliarySpec("bwd_sinks", PARAMS, threads=256, moved=("row_lse", "row_delta"))
