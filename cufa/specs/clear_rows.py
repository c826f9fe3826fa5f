"""Clears the rows of a result that no sequence has."""

from __future__ import annotations

import numpy as np

from cufa.specs.auxiliary import AuxiliarySpec

ROWS = 32
"""That a block looks at."""

SPEC = AuxiliarySpec(
    "clear_rows",
    params=np.dtype(
        [
            *((name, "u8") for name in ("out", "lse", "cu_seqlens_q")),
            ("row_words", "i8"),
            *((name, "i4") for name in ("rows", "heads", "sequences", "max_seqlen_q")),
        ],
        align=True,
    ),
    inputs=("cu_seqlens_q",),
    outputs=("out", "lse"),
    threads=128,
    numbers=("vec",),
)
