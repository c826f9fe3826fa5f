"""Arrays in 8 bits, with scales, from others."""

from __future__ import annotations

import numpy as np

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.instance import Instance
from cufa.specs.structs import TENSOR

ROWS = 128
"""Rows of a head that a block of threads has."""

WHOLE, LARGEST, CONVERT = range(3)
"""Values of ``Pass``."""

SIGNS = 8
"""Words of signs."""

_PITCH, _LARGEST_BYTES = ROWS + 4, 64

FIRST_CAPABILITY = 89
"""GPUs before it have no instruction that converts to 8 bits."""

SPEC = AuxiliarySpec(
    "quantize",
    params=np.dtype(
        [
            ("x", TENSOR),
            *((name, "u8") for name in ("values", "scales", "largest", "cu_seqlens", "used")),
            ("signs", "u4", SIGNS),
            *(
                (name, "i4")
                for name in (
                    *("heads", "rows", "seq", "head_dim", "blocks", "block_log2"),
                    *("scales_a_head", "sequences"),
                )
            ),
        ],
        align=True,
    ),
    inputs=("x",),
    outputs=("values", "scales"),
    threads=512,
    types=("t",),
    numbers=("columns", "hadamard", "transposed", "pass"),
)


def instance(dtype: str, columns: int, hadamard: bool, transposed: bool, how: int) -> Instance:
    """Return the instantiation of a pass: `WHOLE`, `LARGEST` or `CONVERT`."""
    smem = smem_bytes(columns, transposed)
    return Instance(SPEC.name, (dtype,), (columns, hadamard, transposed, how), smem_bytes=smem)


def smem_bytes(columns: int, transposed: bool) -> int:
    """Return the shared memory of a block."""
    return _LARGEST_BYTES + transposed * columns * _PITCH
