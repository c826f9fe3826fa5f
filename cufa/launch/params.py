"""The parameter that a launch passes to a kernel by value, and the memory where it is built."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from cufa.arrays import Array, Ints
from cufa.compiler.dependent import Passed
from cufa.dtypes import DTYPES, kv_bytes
from cufa.features.dropout import SEED
from cufa.features.parts import ARRAYS, part_named
from cufa.features.user_functions import BLOCKS
from cufa.launch import tensor_map
from cufa.launch.signature import TENSORS, AddressSlot
from cufa.planner.plan import Plan
from cufa.problem.extras import NO_EXTRAS, Extras
from cufa.problem.problem import Problem
from cufa.specs import KERNELS
from cufa.specs.kv import LENGTHS
from cufa.specs.params import MAPS_ALIGNMENT
from cufa.specs.structs import numbers_of
from cufa.specs.variant import Variant

_LARGEST = 4096  # bytes, of a kernel's parameters
_TINY = float(np.finfo(np.float32).tiny)
LOG2_E = math.log2(math.e)

FourInts = tuple[Ints, ...]
"""Shapes or strides of q, k, v and the result."""


class Layout:
    """Where the named numbers of a parameter are.

    Parameters
    ----------
    dtype : dtype
        Dtype of the parameter.
    score : tuple of str
        The parts of the score.
    kv : str
        How Q, K and V are found.
    tile : tuple of int
        Rows and keys of a tile, for scores with a `cufa.BlockMask`.

    Attributes
    ----------
    start : int
        The bytes of tensor maps, which come first.
    words : dict
        Offsets of all numbers by name, in 64-bit words.
    """

    def __init__(
        self, dtype: np.dtype, score: tuple[str, ...], kv: str, tile: tuple[int, int] = (0, 0)
    ) -> None:
        numbers = {name: (offset, kind) for name, offset, kind in numbers_of(dtype)}
        self.start, _ = numbers["params.q.data"]
        self.words = {name: offset // 8 for name, (offset, _) in numbers.items()}
        self._struct = _packed(numbers.values(), self.start, dtype.itemsize)
        # `numbers` and `filled` name a number without its struct.
        names = (name.split(".", 1)[1] for name in numbers if not name.startswith("maps."))
        self._places = {name: place for place, name in enumerate(names)}
        self._tile = tile
        parts = [part_named(name) for name in score]
        self._reads = [part for part in parts if part.reads]
        lengths = list(numbers_of(LENGTHS[kv])) if kv in LENGTHS else []
        self._sizes = [name for name, _, kind in lengths if kind != "u8"]
        of_parts = (number for part in parts for number in part.numbers)
        self._own = [*(x.name for x in of_parts if x.dtype != "u8"), *self._sizes]
        # The order of addresses after those of tensors: `ARRAYS`, lengths, the arrays of a caller's
        # own expressions; the seed is last.
        which = itertools.count(len(ARRAYS))
        more = [(f"kv.{name}", next(which)) for name, _, kind in lengths if kind == "u8"]
        for part in self._reads:
            for address in part.addresses:
                of_part = ARRAYS.index(part.argument) if part.axes else next(which)
                more.append((f"{part.name}.{address}", of_part))
        if "Dropout" in score:
            more.append((f"Dropout.{SEED}", -1))
        self._more = more

    def places(
        self, addresses: Iterable[tuple[str, int]], first: int, extras: Extras
    ) -> tuple[AddressSlot, ...]:
        """Return where the addresses go that each launch is given.

        Parameters
        ----------
        addresses : iterable of (str, int)
            Names of numbers, each with its index among a launch's addresses; names that the
            parameter lacks are left out.
        first : int
            The index of the first address of extras.
        extras : Extras
            The extras of all launches.
        """
        of_extras = (
            (name, which if which < 0 else first + extras.place(which))
            for name, which in self._more
        )
        named = (*addresses, *of_extras)
        return tuple((self.words[name], which) for name, which in named if name in self.words)

    def numbers(self, known: Mapping[str, float]) -> list[float]:
        """Return all numbers in order, from those known by name; addresses and others are 0."""
        return [known.get(name, 0) for name in self._places]

    def filled(self, known: Mapping[str, float]) -> bytes:
        """Return the bytes after tensor maps; argument as in `numbers`."""
        return self._struct.pack(*self.numbers(known))

    def of_score(
        self,
        problem: Problem,
        strides: tuple[Ints, ...],
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, float]:
        """Return the numbers of a score's parts, and of lengths, by name.

        Parameters
        ----------
        problem : Problem
        strides : tuple of tuple of int
            Strides of the arrays that parts read, as `cufa.problem.extras.placed` returns them.
        more : mapping
            Numbers of parts that do not follow from the problem, by name.
        """
        if not self._own:
            return {}
        sizes = {name: getattr(problem, name) for name in self._sizes}
        found = {**sizes, **problem.numbers, **more}
        for part, numbers in zip(self._reads, strides, strict=True):
            if part.name == BLOCKS:
                numbers = self._of_lists(problem, numbers)
            names = [number.name for number in part.numbers[len(part.numbers) - len(numbers) :]]
            found |= dict(zip(names, numbers, strict=True))
        return {name: found[name] for name in self._own}

    def _of_lists(self, problem: Problem, lengths: Ints) -> Ints:
        """Return 0 for the address of a `cufa.BlockMask`'s lists, then the steps along its axes."""
        _, batch, heads = lengths
        of_head = math.prod(list_sizes(problem.seq_q, problem.seq_kv, *self._tile))
        return 0, heads * of_head * (batch > 1), of_head * (heads > 1)


class ParameterLayout(Layout):
    """The layout of a variant's parameter, of which little differs from call to call.

    Parameters
    ----------
    variant : Variant
    addresses : sequence of (str, int)
        The numbers that are addresses of tensors, each with its index among a launch's addresses.
    memory : str
        The number that is the address of memory which the blocks of a launch share.

    Attributes
    ----------
    addresses : sequence of (str, int)
    memory_word : int
        The word of `memory`.
    """

    def __init__(self, variant: Variant, addresses: Sequence[tuple[str, int]], memory: str) -> None:
        tile = variant.bm, variant.bn
        super().__init__(variant.parameter, variant.score, variant.kv, tile)
        self.addresses, self.memory_word = addresses, self.words[memory]
        self._itemsize = DTYPES[variant.dtype].bytes
        self._kv_itemsize = kv_bytes(variant.dtype, KERNELS[variant.kernel].kv_dtype)
        self._lengths = slice(self._places["seq_q"], self._places["seq_kv"] + 1)

    def places_of(self, extras: Extras) -> tuple[AddressSlot, ...]:
        """Return where the addresses of tensors and extras go, as `places`."""
        return self.places(self.addresses, TENSORS, extras)

    def of_plan(self, plan: Any, problem: Problem) -> list[float]:
        """Return the numbers that all launches of a plan have in common, as `numbers`.

        Parameters
        ----------
        plan : Plan or DecodePlan
            As the variant's kernel needs it.
        problem : Problem
            One of the problems with this plan; they differ in lengths only.
        """
        raise NotImplementedError

    def of_call(
        self,
        of_plan: list[float],
        problem: Problem,
        strides: FourInts,
        of_arrays: tuple[Ints, ...] = (),
        extras: Extras = NO_EXTRAS,
    ) -> bytes:
        """Return the bytes after tensor maps: all numbers, and 0 for addresses.

        Parameters
        ----------
        of_plan : list
            As the method `of_plan` returns it.
        problem : Problem
        strides : tuple of tuple of int
            Strides of q, k, v and the result, (batch, heads, seq, head_dim), in bytes.
        of_arrays : tuple of tuple of int
            Strides of the arrays that parts of the score read; see `cufa.problem.extras.placed`.
        extras : Extras
            Shapes, strides and dtypes of arrays.
        """
        (q, q1, q2, _), (k, k1, k2, _), (v, v1, v2, _), (o, o1, o2, _) = strides
        size, of_kv, numbers = self._itemsize, self._kv_itemsize, of_plan.copy()
        numbers[:16] = (  # Tensors come first.
            *(0, q // size, q1 // size, q2 // size, 0, k // of_kv, k1 // of_kv, k2 // of_kv),
            *(0, v // of_kv, v1 // of_kv, v2 // of_kv, 0, o // size, o1 // size, o2 // size),
        )
        numbers[self._lengths] = problem.seq_q, problem.seq_kv
        if self._own or extras is not NO_EXTRAS:
            for name, number in self.of_extras(problem, of_arrays, extras).items():
                numbers[self._places[name]] = number
        return self._struct.pack(*numbers)

    def of_extras(
        self, problem: Problem, of_arrays: tuple[Ints, ...], extras: Extras
    ) -> dict[str, float]:
        """Return the numbers of the score, and of arrays besides those of tensors, by name."""
        return self.of_score(problem, of_arrays)


class AttentionLayout(ParameterLayout):
    """The layout of the parameter of kernels of `attention`.

    With TMA, the addresses of Q, K and V are in tensor maps only, and that of O is in its map and
    in ``Params``. Without it, all are in ``Params``.

    Parameters
    ----------
    variant : Variant
    """

    def __init__(self, variant: Variant) -> None:
        spec = KERNELS[variant.kernel]
        address_of = "maps.{}" if spec.tma else "params.{}.data"
        addresses = [(address_of.format(name), i) for i, name in enumerate("qkvo")]
        addresses += [("params.o.data", 3)] * spec.tma + [("params.lse", 4)]
        addresses += [("params.workspace", TENSORS)] * bool(spec.workspace)
        super().__init__(variant, addresses, "params.tiles_drawn")

    def of_plan(self, plan: Plan, problem: Problem) -> list[float]:
        """As in `ParameterLayout`."""
        sections = plan.q_tiles, plan.section_heads, plan.late_rows
        return self.numbers(numbers_of_params(problem, *sections, plan.pack))


def numbers_of_params(
    problem: Problem, q_tiles: int, section_heads: int, late_rows: int = 0, pack: int = 1
) -> dict[str, float]:
    """Return the numbers of ``Params`` of ``kernels/params.cuh``, except those of tensors.

    Parameters
    ----------
    problem : Problem
        With a scale that is not negative.
    q_tiles, section_heads, late_rows, pack : int
        As in its plan. The kernel counts heads whose rows are packed as one.
    """
    return {
        "scale_log2": scale_log2(problem.scale),
        "heads_q": problem.heads_q // pack,
        "group": problem.group // pack,
        **{name: getattr(problem, name) for name in ("seq_q", "seq_kv", "head_dim", "head_dim_v")},
        "q_tiles": q_tiles,
        "heads": problem.batch * problem.heads_q // pack,
        "section_heads": section_heads,
        "late_rows": late_rows,
        "pack_log2": pack.bit_length() - 1,  # a power of two
    }


def steps_of(problem: Problem, arrays: Mapping[str, Array]) -> dict[str, float]:
    """Return the numbers of tensors in ``Params`` by name, except their addresses."""
    found: dict[str, float] = {}
    for name, array in arrays.items():
        batch, head, seq = (step // array.itemsize for step in array.strides[:3])
        # Packed sequences are not along this axis.
        found[f"{name}.stride_batch"] = 0 if problem.kv == "Varlen" else batch
        found[f"{name}.stride_head"], found[f"{name}.stride_seq"] = head, seq
    return found


def list_sizes(seq_q: int, seq_kv: int, bm: int, bn: int) -> tuple[int, int]:
    """Return how many lists of tiles a head has with a `cufa.BlockMask`, and the length of each.

    See ``Visits`` of ``kernels/blocks.cuh``.
    """
    return -(-seq_q // bm), 2 * (-(-seq_kv // bn) + 1)


_CODES = {"u8": "Q", "i8": "q", "u4": "I", "i4": "i", "f4": "f"}


def _packed(numbers: Iterable[tuple[int, np.dtype]], start: int, end: int) -> struct.Struct:
    """Return the `Struct` that packs numbers, and the gaps between them.

    Parameters
    ----------
    numbers : iterable of (int, dtype)
        Offset and type; those before `start` are left out.
    start, end : int
        First byte of the packed fields, and the byte after the last.
    """
    text, at = "=", start
    for offset, dtype in numbers:
        if offset >= start:
            text += "x" * (offset - at) + _CODES[dtype.str[1:]]
            at = offset + dtype.itemsize
    return struct.Struct(text + "x" * (end - at))


def scale_log2(scale: float) -> float:
    """Return the factor of scores for exponentials to the base 2; `scale` must not be negative.

    With 0, a masked score would become NaN, -inf * 0: the least normal number keeps it -inf.
    """
    return max(scale * LOG2_E, _TINY)


class Buffer:
    """Memory in which the parameter of one launch is put together.

    Attributes
    ----------
    bytes, words : memoryview
        The memory, by 8 and by 64 bits.
    content : bytes or None
        The bytes that a launch copied here last; then it filled in addresses. None if unknown.
    maps : Encoder
        Encodes tensor maps, at the beginning of the memory.
    args : tuple
        A kernel's one argument, as `cupy.cuda.Function` takes it.
    passed : Passed
        The same, as the driver takes it.
    """

    __slots__ = ("args", "bytes", "content", "maps", "passed", "words")

    def __init__(self) -> None:
        import cupy

        memory = np.zeros(_LARGEST + MAPS_ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % MAPS_ALIGNMENT
        address = memory.ctypes.data + start
        self.bytes = memory.data[start : start + _LARGEST]
        self.words = self.bytes.cast("Q")
        self.content: bytes | None = None
        self.maps = tensor_map.Encoder(self.words, address)
        self.passed = Passed(address)
        self.args: tuple[Any, ...] = (cupy.cuda.function.CPointer(address),)


free_buffers: list[Buffer] = []
"""Buffers that nobody uses: each launch under way has one of its own."""


def taken_buffer() -> Buffer:
    """Return a buffer that nobody else uses until it is put back among the free ones."""
    try:
        return free_buffers.pop()  # in one step, whatever other threads do
    except IndexError:
        return Buffer()


def encoded_map(dtype: str, address: int, shape: Ints, strides: Ints, box: Ints) -> bytes:
    """Return a tensor map; arguments as in `tensor_map.Encoder.encoded`."""
    buffer = taken_buffer()
    buffer.content = None
    encoded = buffer.maps.encoded(dtype, address, shape, strides, box)
    free_buffers.append(buffer)
    return encoded
