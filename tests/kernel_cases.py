"""Which kernels take every feature, and sizes to try each of them with."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference import random_inputs

KERNELS = (
    ("fa2_fp32", "float32"),
    ("fa2_mma", "float16"),
    ("fa2_mma", "bfloat16"),
    ("fa3_wgmma", "float16"),
    ("fa3_wgmma", "bfloat16"),
)

#: Batch, query heads, K/V heads, queries and keys.
SHAPES = ((2, 4, 2, 131, 257), (1, 6, 1, 300, 190), (2, 8, 2, 21, 400), (2, 2, 2, 333, 333))


def inputs(rng: np.random.Generator, dtype: str, sizes: Any, d: int = 24) -> Any:
    """Return q, k and v of such sizes."""
    b, hq, hk, sq, sk = sizes
    return random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d)
