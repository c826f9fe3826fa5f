"""New tokens into a cache of 8 bits, where each row of keys and values has a scale."""

from __future__ import annotations

from cufa.specs.append import PARAMS
from cufa.specs.auxiliary import AuxiliarySpec

SPEC = AuxiliarySpec("append8", PARAMS)
