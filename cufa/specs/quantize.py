"""Arrays in 8 bits, with scales, from others."""

from __future__ import annotations

from typing import NamedTuple

from cufa.specs.auxiliary import AuxiliarySpec
from cufa.specs.instance import Instance
from cufa.specs.kv import DIVISOR
from cufa.specs.structs import TENSOR, struct

ROWS = 128
"""Rows of a head that a block of threads has at a time."""

WHOLE, LARGEST, CONVERT = range(3)
"""Values of ``Pass``."""

SIGNS = 8
"""Words of signs."""

_WARP, _WORD, _KEYS, _TURNS, _PLACE = 32, 4, 16, 8, 32

FIRST_CAPABILITY = 89
"""GPUs before it have no instruction that converts to 8 bits."""

SPEC = AuxiliarySpec(
    "quantize",
    struct(
        (TENSOR, "x"),
        ("u8", "values scales largest cu_seqlens used"),
        (("u4", SIGNS), "signs"),
        (DIVISOR, "heads blocks"),
        ("i4", "tiles rows seq head_dim block_log2 scales_a_head sequences overlaps"),
    ),
)


class Shape(NamedTuple):
    """The threads that take tiles in turn.

    Attributes
    ----------
    lanes : int
        Threads of a row.
    blocks_per_sm : int
        The blocks that share a multiprocessor.
    """

    lanes: int
    blocks_per_sm: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return ROWS * self.lanes


def shape(columns: int) -> Shape:
    """Return the shape for rows of this length: registers hold the tiles of all blocks."""
    lanes = 4 if columns in (128, 256) else 2
    return Shape(lanes, {64: 4, 96: 3, 128: 2, 192: 2, 256: 1}[columns])


def instance(dtype: str, columns: int, hadamard: bool, transposed: bool, how: int) -> Instance:
    """Return the instantiation of a pass: `WHOLE`, `LARGEST` or `CONVERT`.

    Shared memory holds where the tiles of some turns are; the largest numbers of warps, for two
    tiles; the signs of a row; a tile to be transposed; and a tile that is read ahead, or half of
    one.
    """
    its, row = shape(columns), columns * (4 if dtype == "float32" else 2)
    largest = 2 * its.threads // _WARP * _WORD
    tile = ROWS * columns + ROWS // _KEYS * 16
    ahead = ROWS * row // (2 if row > 512 else 1)
    smem = _TURNS * _PLACE + largest + hadamard * row + transposed * tile + ahead
    arguments = columns, hadamard, transposed, how, *its
    return Instance(SPEC.name, (dtype,), arguments, smem_bytes=smem)
