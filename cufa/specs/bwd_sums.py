"""After the products of the backward pass: the gradient of an array of its sums."""

from __future__ import annotations

import numpy as np

from cufa.specs.auxiliary import AuxiliarySpec

_AXES = ("batch", "heads", "queries", "keys")

SPEC = AuxiliarySpec(
    "bwd_sums",
    params=np.dtype(
        [
            *(("sums", "u8"), ("gradient", "u8"), ("elements", "i8")),
            *((name, "i4") for name in (*_AXES, *(f"sums_{axis}" for axis in _AXES), "lanes")),
        ],
        align=True,
    ),
    inputs=("sums",),
    outputs=("gradient",),
    threads=128,
    types=("t",),
)
