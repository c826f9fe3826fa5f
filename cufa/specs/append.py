"""New tokens into a cache of keys and values, turned by rotary position embedding on the way."""

from __future__ import annotations

import numpy as np

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.layout import TENSOR

_INPUTS, _OUTPUTS = ("k", "v", "q"), ("turned_q", "k_cache", "v_cache")

SPEC = AuxiliarySpec(
    "append",
    params=np.dtype(
        [
            *((name, TENSOR) for name in (*_INPUTS, *_OUTPUTS)),
            *((name, "u8") for name in ("starts", "lengths", "table")),
            ("table_stride", "i8"),
            *((name, "u8") for name in ("cos", "sin")),
            *(
                (name, "i4")
                for name in (
                    *("seq", "heads_kv", "heads_q", "head_dim", "head_dim_v", "rotary_dim"),
                    *("positions", "page_size", "pages", "pages_a_sequence"),
                )
            ),
        ],
        align=True,
    ),
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    threads=128,
    types=("t",),
    numbers=("vec", "interleaved"),
)
