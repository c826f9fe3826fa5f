"""CUtensorMap: how TMA, Hopper's copy engine, finds its way in a tensor."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

from cufa.arrays import Ints
from cufa.compiler import driver
from cufa.dtypes import DTYPES
from cufa.specs.params import MAP_WORDS

_SWIZZLE = {16: 1, 32: 2, 64: 3}  # CUtensorMapSwizzle by 16-bit columns of a box: 32, 64, 128 bytes
_NOT_INTERLEAVED, _L2_PROMOTION_128B, _ZEROS_OUTSIDE = 0, 2, 0
_RANK = 5
_NUMBERS = struct.Struct("=5Q4q5I")  # sizes, strides, sizes of a box

_pointer = ctypes.c_void_p.from_param  # of what ctypes makes of an address, it passes this at once
_ones = ctypes.create_string_buffer(struct.pack(f"={_RANK}I", *[1] * _RANK))
_STEPS_IN_BOX = _pointer(ctypes.addressof(_ones))


@functools.cache
def _encode_tiled() -> Any:
    return driver.function("cuTensorMapEncodeTiled", keeps_lock=True)


class Encoder:
    """Makes tensor maps, one after the other.

    Parameters
    ----------
    words : memoryview
        64-bit words, with place for a map.
    address : int
        Theirs, a multiple of 64.
    """

    __slots__ = ("_box", "_map", "_numbers", "_place", "_sizes", "_strides")

    def __init__(self, words: memoryview, address: int) -> None:
        self._map = words[:MAP_WORDS]
        self._place = _pointer(address)
        numbers = (ctypes.c_char * _NUMBERS.size)()
        self._numbers = memoryview(numbers).cast("B")
        start = ctypes.addressof(numbers)
        self._sizes, self._strides, self._box = (
            _pointer(start + offset) for offset in (0, 5 * 8, 9 * 8)
        )

    def encoded(self, dtype: str, address: int, shape: Ints, strides: Ints, box: Ints) -> bytes:
        """Return the map of an array whose boxes are panels of a tile in shared memory.

        Its axes are, the innermost first: (head_dim, pack, seq, heads / pack, batch). Along batch
        or heads it has one element where the stride is 0.

        Parameters
        ----------
        dtype : str
            "float16" or "bfloat16".
        address : int
            A multiple of 16. It will be the map's first word, on which no other depends.
        shape, strides : tuple of int
            (batch, heads, seq, head_dim), and the steps between them in bytes: the last axis
            contiguous, the others multiples of 16.
        box : tuple of int
            The neighbouring heads whose rows lie together in a box, query by query; its rows, of
            all these heads; its columns: 16, 32 or 64.

        Raises
        ------
        RuntimeError
            The driver refuses.
        """
        (pack, rows, columns), (batch, heads, seq, head_dim) = box, shape
        of_batch, of_head, of_seq, _ = strides
        batches = batch if of_batch else 1
        groups = heads // pack if of_head else 1
        sizes, in_box = (head_dim, pack, seq, groups, batches), (columns, pack, rows // pack, 1, 1)
        steps = (  # That of an axis with one element is not used.
            *(of_head if pack > 1 else 16, of_seq if seq > 1 else 16),
            *(of_head * pack if groups > 1 else 16, of_batch if batches > 1 else 16),
        )
        _NUMBERS.pack_into(self._numbers, 0, *sizes, *steps, *in_box)
        arguments = (
            *(self._place, DTYPES[dtype].tma, _RANK, _pointer(address)),
            *(self._sizes, self._strides, self._box, _STEPS_IN_BOX),
            *(_NOT_INTERLEAVED, _SWIZZLE[columns], _L2_PROMOTION_128B, _ZEROS_OUTSIDE),
        )
        status = _encode_tiled()(*arguments)
        if status == driver.INVALID_CONTEXT:
            driver.make_context_current()
            status = _encode_tiled()(*arguments)
        if status or self._map[0] != address:
            raise RuntimeError(
                f"the driver cannot describe an array of shape {shape}, strides {strides} "
                f"to TMA (cuTensorMapEncodeTiled: {status})"
            )
        return self._map.tobytes()
