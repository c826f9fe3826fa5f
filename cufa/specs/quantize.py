"""Arrays in 8 bits, with scales, from others."""

from __future__ import annotations

from cufa.dtypes import DTYPES
from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.instance import Instance
from cufa.specs.kv import DIVISOR
from cufa.specs.structs import TENSOR

ROWS = 128
"""Rows of a head that a block of threads has at a time."""

WHOLE, LARGEST, CONVERT = range(3)
"""Values of ``Pass``."""

SIGNS = 8
"""Words of signs."""

_WARP, _WORD, _KEYS, _TURNS, _PLACE = 32, 4, 16, 8, 32

FIRST_CAPABILITY = 89
"""GPUs before it have no instruction that converts to 8 bits."""

SPEC = AuxiliarySpec.of(
    "quantize",
    (TENSOR, "x"),
    ("u8", "values scales largest cu_seqlens used"),
    (("u4", SIGNS), "signs"),
    (DIVISOR, "heads blocks"),
    ("i4", "tiles rows seq head_dim block_log2 scales_a_head sequences overlaps"),
    threads=4 * ROWS,  # four of a row
)

_BLOCKS_PER_SM = {2: {64: 3, 96: 2, 128: 2}, 4: {64: 2, 96: 2}}


def blocks_per_sm(dtype: str, columns: int) -> int:
    """Return how many blocks share a multiprocessor, whose registers hold their tiles."""
    return _BLOCKS_PER_SM[DTYPES[dtype].bytes].get(columns, 1)


def instance(dtype: str, columns: int, hadamard: bool, transposed: bool, how: int) -> Instance:
    """Return the instantiation of a pass: `WHOLE`, `LARGEST` or `CONVERT`.

    Shared memory holds where the tiles of some turns are; the largest numbers of warps, for two
    tiles; the signs of a row; a tile to be transposed; and a tile that is read ahead, or half of
    one.
    """
    row = columns * DTYPES[dtype].bytes
    largest = 2 * SPEC.threads // _WARP * _WORD
    tile = ROWS * columns + ROWS // _KEYS * 16
    ahead = ROWS * row // (2 if row > 512 else 1)
    smem = _TURNS * _PLACE + largest + hadamard * row + transposed * tile + ahead
    arguments = columns, hadamard, transposed, how, blocks_per_sm(dtype, columns)
    return Instance(SPEC.name, (dtype,), arguments, smem_bytes=smem)
