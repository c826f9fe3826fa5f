"""Plan -> launch: the parameter of attention's kernels, filled in but for addresses."""

from __future__ import annotations

from functools import partial
from typing import Any

from cufa.features.parts import is_uneven
from cufa.launch import counters, scratch
from cufa.launch.decode import DecodeLayout
from cufa.launch.launch import Launch, Memory
from cufa.launch.params import FourInts, Ints, Layout, free_buffers, taken_buffer
from cufa.launch.signature import TENSORS, Place
from cufa.launch.tensor_map import Encoder
from cufa.planner.decode import DecodePlan
from cufa.planner.plan import Plan
from cufa.problem.extras import Extras
from cufa.problem.problem import Problem
from cufa.specs import KERNELS
from cufa.specs.kv import LENGTHS
from cufa.specs.tile import panel_columns
from cufa.specs.variant import Variant

_ROWS = 64  # of a box of Q or of O: a warpgroup's

_Described = tuple[Ints, Ints, tuple[int, int], int]
"""Of a tensor map: shape and strides of the array, heads and rows of a box, and its columns."""


class Loaded:
    """A variant that is ready to be launched on a device.

    Parameters
    ----------
    variant : Variant
    function : cupy.cuda.Function or Dependent
    device_id : int
    extras : Extras
        Of all its launches: arrays, or what they are like.

    Attributes
    ----------
    variant : Variant
    tma : bool
        Whether it reads and writes through tensor maps.
    """

    def __init__(self, variant: Variant, function: Any, device_id: int, extras: Extras) -> None:
        kernel = KERNELS[variant.kernel]
        self.variant, self.tma = variant, kernel.tma
        self._function = function
        self._layout: Layout | DecodeLayout
        if kernel.decodes:
            self._layout = decoding = DecodeLayout(variant)
            self._places = decoding.places(extras)
        else:
            self._layout = tiled = Layout(variant)
            self._places = _places(tiled, variant, extras)
        self._scratch = scratch.of_device(device_id)
        self._counters = counters.of_device(device_id)
        self._needs_counters = kernel.persistent
        self._columns = panel_columns(variant.head_dim)
        self._columns_v = panel_columns(variant.head_dim_v)
        self._maps: list[tuple[_Described, bytes] | None] = [None] * 4
        # Blocks draw the tiles that wait for them, see kernels/scheduler_sm90.cuh.
        uneven = is_uneven(variant.score) or variant.kv in LENGTHS
        self._draws_tiles = kernel.persistent and uneven

    def reserve(self) -> None:
        """Make sure that launches find the memory they need; not while a graph is captured."""
        if self._needs_counters:
            self._counters.reserve()

    def launch(
        self,
        plan: Plan | DecodePlan,
        problem: Problem,
        shapes: FourInts,
        strides: FourInts,
        address: int,
        numbers: tuple[Ints, ...],
        extras: Extras,
    ) -> Launch:
        """Return a launch that is given the addresses of q, k, v, the result, its LSE and extras.

        Parameters
        ----------
        plan : Plan or DecodePlan
        problem : Problem
            Not empty, and with a scale that is not negative.
        shapes, strides : tuple of tuple of int
            Of q, k, v and the result, as 4-D (batch, heads, seq, head_dim) arrays that the kernel
            takes as they are; strides in bytes.
        address : int
            Of any such array: the driver makes no tensor map without, but each launch has its own.
        numbers : tuple of tuple of int
            Of the arrays that parts of the score read, as `cufa.problem.extras.placed` returns it.
        extras : Extras
            What these are like: shape, strides and dtype.
        """
        layout = self._layout
        parameter: Any
        memory: Memory | None = None
        if isinstance(plan, DecodePlan):
            assert isinstance(layout, DecodeLayout)
            table_stride = 0 if extras.table is None else extras.table.strides[0]
            parameter = layout.filled(plan, problem, strides, numbers, table_stride)
            if plan.partial_floats:
                memory = layout.partial, partial(self._scratch.take, plan.partial_floats)
        else:
            assert isinstance(layout, Layout)
            parameter = self._filled(layout, plan, problem, shapes, strides, address, numbers)
            tiles = problem.batch * problem.heads_q // plan.pack * plan.q_tiles
            # Of fewer, each block's own: see next_tile in kernels/scheduler_sm90.cuh.
            if self._draws_tiles and tiles > 2 * plan.grid:
                memory = layout.places[-1], self._counters.take
        grid = (plan.grid, 1, 1)
        return Launch(
            self._function, grid, plan.block, parameter, self._places, plan.smem_bytes, memory
        )

    def _filled(
        self,
        layout: Layout,
        plan: Plan,
        problem: Problem,
        shapes: FourInts,
        strides: FourInts,
        address: int,
        numbers: tuple[Ints, ...],
    ) -> bytes:
        """Return the parameter, of which the addresses are missing; arguments as of `launch`."""
        buffer = taken_buffer()
        if self.tma:
            of_rows, of_keys = (plan.pack, _ROWS), (1, self.variant.bn)
            boxes = of_rows, of_keys, of_keys, of_rows
            columns = self._columns, self._columns, self._columns_v, self._columns_v
            for i, described in enumerate(zip(shapes, strides, boxes, columns, strict=True)):
                self._encode(buffer.maps, i, address, described)
        layout.fill(buffer.bytes, plan, problem, strides, numbers)
        content = bytes(buffer.bytes[: layout.nbytes])
        free_buffers.append(buffer)
        return content

    def _encode(self, maps: Encoder, index: int, address: int, described: _Described) -> None:
        """Make a tensor map, or copy the latest such: V often lies as K does, and O as Q."""
        for known in (self._maps[index], self._maps[3 - index]):
            if known is not None and known[0] == described:
                maps.write(index, known[1])
                return
        shape, strides, (pack, rows), columns = described
        maps.encode(index, self.variant.dtype, address, shape, strides, pack, rows, columns)
        self._maps[index] = described, maps.read(index)


def _places(layout: Layout, variant: Variant, extras: Extras) -> tuple[Place, ...]:
    """Return where addresses go: those of the tensors, of a workspace or else of extras."""
    q, k, v, out, map_of_out, lse, _ = layout.places
    tensors = (q, 0), (k, 1), (v, 2), (out, 3), (map_of_out, 3), (lse, 4)
    if KERNELS[variant.kernel].workspace:
        return *tensors, *((word, TENSORS) for word, _ in layout.places_beside)
    others = (
        (word, which if which < 0 else TENSORS + extras.place(which))
        for word, which in layout.places_beside
    )
    return *tensors, *others
