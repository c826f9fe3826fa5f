"""The parameter that a launch passes to a kernel by value, and the memory where it is made."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

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
from cufa.specs.template_arguments import TemplateArguments
from cufa.specs.variant import Variant

_LARGEST = 4096  # bytes, of a kernel's parameters
_TINY = float(np.finfo(np.float32).tiny)
LOG2_E = math.log2(math.e)

Ints = tuple[int, ...]
FourInts = tuple[Ints, ...]
"""Shapes or strides of q, k, v and the result."""


class ScoreLayout:
    """Where the numbers of a score's parts, and of lengths, are in the parameter of a variant.

    Parameters
    ----------
    variant : TemplateArguments
    dtype : dtype
        Dtype of the parameter.

    Attributes
    ----------
    places : tuple of (int, int)
        Where the addresses of further arrays are, in 64-bit words, and which of them goes there:
        first come `cufa.features.parts.ARRAYS`, then those of lengths, then those of a caller's own
        expressions; the last one is the seed.
    """

    def __init__(self, variant: TemplateArguments, dtype: np.dtype) -> None:
        offsets = {name: offset for name, offset, _ in numbers_of(dtype)}
        parts = [part_named(name) for name in variant.score]
        self._tile = variant.bm, variant.bn
        self._reads = [part for part in parts if part.reads]
        lengths = LENGTHS.get(variant.kv, ())
        self._lengths = [number.name for number in lengths if number.dtype == "u8"]
        self._sizes = [number.name for number in lengths if number.dtype != "u8"]
        further = (*(number for part in parts for number in part.numbers), *lengths)
        self._names = tuple(number.name for number in further)
        number = itertools.count(len(ARRAYS))
        places = [(offsets[f"kv.{name}"] // 8, next(number)) for name in self._lengths]
        for part in self._reads:
            for address in part.addresses:
                which = ARRAYS.index(part.argument) if part.axes else next(number)
                places.append((offsets[f"{part.name}.{address}"] // 8, which))
        if "Dropout" in variant.score:
            places.append((offsets[f"Dropout.{SEED}"] // 8, -1))
        self.places = tuple(places)

    def placed(self, first: int, extras: Extras) -> tuple[AddressSlot, ...]:
        """Return where the addresses of extras go, of which `first` is the number of the first."""
        return tuple(
            (word, which if which < 0 else first + extras.place(which))
            for word, which in self.places
        )

    def values(
        self,
        problem: Problem,
        strides: tuple[Ints, ...],
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> list[float]:
        """Return the numbers, in order; addresses are 0.

        Parameters
        ----------
        problem : Problem
        strides : tuple of tuple of int
            Strides of the arrays that parts read, as `cufa.problem.extras.placed` returns them.
        more : mapping
            Parameters of parts that are not of the problem, by name.
        """
        if not self._names:
            return []
        arrays = dict.fromkeys([*self._lengths, SEED], 0)
        for part, numbers in zip(self._reads, strides, strict=True):
            if part.name == BLOCKS:
                numbers = self._of_lists(problem, numbers)
            names = [number.name for number in part.numbers[len(part.numbers) - len(numbers) :]]
            arrays |= dict(zip(names, numbers, strict=True))
        sizes = {name: getattr(problem, name) for name in self._sizes}
        known = {**sizes, **problem.numbers, **arrays, **more}
        return [known[name] for name in self._names]

    def _of_lists(self, problem: Problem, lengths: Ints) -> Ints:
        """Return the address, 0, and the steps of a `cufa.BlockMask`'s lists along its axes."""
        _, batch, heads = lengths
        of_head = math.prod(list_sizes(problem.seq_q, problem.seq_kv, *self._tile))
        return 0, heads * of_head * (batch > 1), of_head * (heads > 1)


class PlanNumbers(NamedTuple):
    """The numbers in a parameter that are those of a plan, before and behind the lengths."""

    before_lengths: tuple[float, ...]
    behind_lengths: tuple[float, ...]


class Layout:
    """Where the numbers of a parameter are.

    Parameters
    ----------
    variant : TemplateArguments
    dtype : dtype
        Dtype of the parameter.

    Attributes
    ----------
    start : int
        The bytes of tensor maps, which come first.
    words : dict
        Offsets of all numbers by name, in 64-bit words.
    """

    def __init__(self, variant: TemplateArguments, dtype: np.dtype) -> None:
        numbers = {name: (offset, kind) for name, offset, kind in numbers_of(dtype)}
        self.start, _ = numbers["params.q.data"]
        self.words = {name: offset // 8 for name, (offset, _) in numbers.items()}
        self._numbers = packed(numbers.values(), self.start, dtype.itemsize)
        self._score = ScoreLayout(variant, dtype)


class ParameterLayout(Layout):
    """Where what differs from call to call is in the parameter of a variant, whatever its kernel.

    Parameters
    ----------
    variant : Variant
    tensors : sequence of (str, int)
        The numbers that are addresses of tensors, and which of a launch's addresses each is.
    memory : str
        The number that is the address of memory which the blocks of a launch share.

    Attributes
    ----------
    memory_word : int
        The word of that number.
    """

    def __init__(self, variant: Variant, tensors: Sequence[tuple[str, int]], memory: str) -> None:
        super().__init__(variant, variant.parameter)
        self.memory_word = self.words[memory]
        self._tensors = tuple((self.words[name], which) for name, which in tensors)
        self._itemsize = DTYPES[variant.dtype].bytes
        self._kv_itemsize = kv_bytes(variant.dtype, KERNELS[variant.kernel].kv_dtype)

    def places(self, extras: Extras) -> tuple[AddressSlot, ...]:
        """Return where the addresses of tensors and extras go, which each launch is given.

        Parameters
        ----------
        extras : Extras
            The extras of all launches.
        """
        return *self._tensors, *self._score.placed(TENSORS, extras)

    def of_plan(self, plan: Any, problem: Problem) -> PlanNumbers:
        """Return the numbers that all launches of a plan have in common.

        Parameters
        ----------
        plan : Plan or DecodePlan
            As the variant's kernel needs it.
        problem : Problem
            One of the problems with this plan; they differ in lengths only.
        """
        raise NotImplementedError

    def filled(
        self,
        of_plan: PlanNumbers,
        problem: Problem,
        strides: FourInts,
        numbers: tuple[Ints, ...] = (),
        extras: Extras = NO_EXTRAS,
    ) -> bytes:
        """Return what follows tensor maps: all numbers; addresses are 0.

        Parameters
        ----------
        of_plan : PlanNumbers
        problem : Problem
        strides : tuple of tuple of int
            Strides of q, k, v and the result, (batch, heads, seq, head_dim), in bytes.
        numbers : tuple of tuple of int
            Strides of the arrays that parts of the score read; see `cufa.problem.extras.placed`.
        extras : Extras
            Shapes, strides and dtypes of arrays.
        """
        return self._numbers.pack(
            *self._of_tensors(strides),
            *of_plan.before_lengths,
            problem.seq_q,
            problem.seq_kv,
            *of_plan.behind_lengths,
            *self._of_scales(extras),
            *self._score.values(problem, numbers),
            *self._of_table(problem, extras),
        )

    def _of_scales(self, extras: Extras) -> Ints:
        """Return the numbers of the scales of K and V, if the kernel has them."""
        return ()

    def _of_table(self, problem: Problem, extras: Extras) -> Ints:
        """Return the numbers of a block table, if the kernel has one."""
        return ()

    def _of_tensors(self, strides: FourInts) -> Ints:
        """Return addresses, which are 0, and steps in elements."""
        size, of_kv, (of_q, of_k, of_v, of_out) = self._itemsize, self._kv_itemsize, strides
        q_batch, q_head, q_seq, _ = of_q
        k_batch, k_head, k_seq, _ = of_k
        v_batch, v_head, v_seq, _ = of_v
        o_batch, o_head, o_seq, _ = of_out
        return (
            0,
            q_batch // size,
            q_head // size,
            q_seq // size,
            0,
            k_batch // of_kv,
            k_head // of_kv,
            k_seq // of_kv,
            0,
            v_batch // of_kv,
            v_head // of_kv,
            v_seq // of_kv,
            0,
            o_batch // size,
            o_head // size,
            o_seq // size,
        )


class AttentionLayout(ParameterLayout):
    """The layout of the parameter of kernels of `attention`.

    TMA needs the addresses of Q, K and V in its maps only, and that of O in both; without it, the
    two are one.

    Parameters
    ----------
    variant : Variant
    """

    def __init__(self, variant: Variant) -> None:
        spec = KERNELS[variant.kernel]
        address_of = "maps.{}" if spec.tma else "params.{}.data"
        tensors = [(address_of.format(name), i) for i, name in enumerate("qkvo")]
        tensors += [("params.o.data", 3)] * spec.tma + [("params.lse", 4)]
        tensors += [("params.workspace", TENSORS)] * bool(spec.workspace)
        super().__init__(variant, tensors, "params.tiles_drawn")

    def of_plan(self, plan: Plan, problem: Problem) -> PlanNumbers:
        """As in `ParameterLayout`."""
        heads_q = problem.heads_q
        pack = plan.pack  # to the kernel, heads whose rows are packed are one
        lse = workspace = tiles_drawn = 0  # addresses
        return PlanNumbers(
            (
                *(lse, workspace, tiles_drawn),
                scale_log2(problem.scale),
                heads_q // pack,
                heads_q // problem.heads_kv // pack,
            ),
            (
                problem.head_dim,
                problem.head_dim_v,
                plan.q_tiles,
                problem.batch * heads_q // pack,
                plan.section_heads,
                plan.late_rows,
                pack.bit_length() - 1,  # a power of two
            ),
        )


def list_sizes(seq_q: int, seq_kv: int, bm: int, bn: int) -> tuple[int, int]:
    """Return how many lists a head has where tiles of keys are left out, and how long one is.

    See ``Visits`` of ``kernels/blocks.cuh``.
    """
    return -(-seq_q // bm), 2 * (-(-seq_kv // bn) + 1)


_CODES = {"u8": "Q", "i8": "q", "u4": "I", "i4": "i", "f4": "f"}


def packed(numbers: Iterable[tuple[int, np.dtype]], start: int, end: int) -> struct.Struct:
    """Return what packs numbers, and the gaps between them.

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
    """Return the factor of scores whose exponential is to the base 2, of a scale that is not < 0.

    Zero would make NaN of a masked score, -inf * 0; the least normal number keeps it.
    """
    return max(scale * LOG2_E, _TINY)


class Buffer:
    """Memory in which the parameter of one launch is put together.

    Attributes
    ----------
    bytes, words : memoryview
        The memory, by 8 and by 64 bits.
    maps : Encoder
        Encodes the tensor maps, which are made at its beginning.
    args : tuple
        A kernel's one argument, as `cupy.cuda.Function` takes it.
    passed : Passed
        The same, as the driver takes it.
    """

    __slots__ = ("args", "bytes", "maps", "passed", "words")

    def __init__(self) -> None:
        import cupy

        memory = np.zeros(_LARGEST + MAPS_ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % MAPS_ALIGNMENT
        address = memory.ctypes.data + start
        self.bytes = memory.data[start : start + _LARGEST]
        self.words = self.bytes.cast("Q")
        self.maps = tensor_map.Encoder(self.words, address)
        self.passed = Passed(address)
        self.args: tuple[Any, ...] = (cupy.cuda.function.CPointer(address),)


free_buffers: list[Buffer] = []
"""Buffers that nobody uses: each launch under way has one of its own."""


def taken_buffer() -> Buffer:
    """Return a buffer that nobody else uses until it is among the free ones again."""
    try:
        return free_buffers.pop()  # in one step, whatever other threads do
    except IndexError:
        return Buffer()


def encoded_map(dtype: str, address: int, shape: Ints, strides: Ints, box: Ints) -> bytes:
    """Return a tensor map; arguments as in `tensor_map.Encoder.encoded`."""
    buffer = taken_buffer()
    encoded = buffer.maps.encoded(dtype, address, shape, strides, *box)
    free_buffers.append(buffer)
    return encoded
