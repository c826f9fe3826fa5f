"""Attention over a set of keys from attention over its parts."""

from __future__ import annotations

import numpy as np

from cufa.specs.auxiliary import AuxiliarySpec

MAX_PARTS = 128
"""Whose addresses the parameter, of 4 KiB at most, has room for: those of others lie in memory."""

PART = np.dtype([("out", "u8"), ("lse", "u8")], align=True)
"""The layout of ``Part``."""

_STRIDES = [("batch", "i8"), ("head", "i8"), ("seq", "i8")]

SPEC = AuxiliarySpec(
    "merge",
    params=np.dtype(
        [
            ("out", "u8"),
            ("lse", "u8"),
            ("of_out", _STRIDES),
            ("of_parts", _STRIDES),
            ("of_part_lses", _STRIDES),
            *((name, "i4") for name in ("rows", "heads", "seq", "head_dim", "parts")),
            ("part", PART, MAX_PARTS),
            ("others", "u8"),
        ],
        align=True,
    ),
    inputs=("part", "others"),
    outputs=("out", "lse"),
    threads=256,
    types=("t", "u"),
    numbers=("vec",),
)
