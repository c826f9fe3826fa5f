"""Which tiles of queries and keys a caller's own mask hides."""

from __future__ import annotations

import numpy as np

from cufa.specs.auxiliary import AuxiliarySpec

SPEC = AuxiliarySpec(
    "block_mask",
    params=np.dtype(
        [
            ("kinds", "u8"),
            *(
                (name, "i4")
                for name in (
                    *("heads", "rows", "columns", "tiles"),
                    *("seq_q", "seq_kv", "queries", "keys"),
                )
            ),
        ],
        align=True,
    ),
    inputs=(),  # but for those of the mask
    outputs=("kinds",),
    threads=128,
    takes_mask=True,
)
