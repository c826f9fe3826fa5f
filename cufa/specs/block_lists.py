"""Which tiles of keys each tile of rows visits, from the kinds of a mask's own tiles."""

from __future__ import annotations

import numpy as np

from cufa.specs.auxiliary import AuxiliarySpec

SPEC = AuxiliarySpec(
    "block_lists",
    params=np.dtype(
        [
            *((name, "u8") for name in ("kinds", "lists")),
            *(
                (name, "i4")
                for name in (
                    *("kind_rows", "kind_columns", "queries", "keys"),
                    *("rows", "columns", "bm", "bn"),
                    *("lines", "seq_q", "seq_kv"),
                )
            ),
        ],
        align=True,
    ),
    inputs=("kinds",),
    outputs=("lists",),
    threads=128,
    numbers=("threads",),
)
