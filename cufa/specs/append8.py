"""New tokens into a cache of 8 bits, where each row of keys and values has a scale."""

from __future__ import annotations

from cufa.specs.append import INPUTS, OUTPUTS, PARAMS, SCALES
from cufa.specs.auxiliary import AuxiliarySpec

SPEC = AuxiliarySpec(
    "append8",
    params=PARAMS,
    inputs=INPUTS,
    outputs=(*OUTPUTS, *SCALES),
    threads=128,
    types=("t",),
    numbers=("vec", "interleaved", "integers"),
)
