"""Plan -> launch: a kernel's parameter filled in, but for the addresses that each call gives."""

from __future__ import annotations

from typing import Any

from cufa.launch.argument import launcher
from cufa.launch.counters import low, of_device, refill
from cufa.launch.params import FourInts, Ints, Layout, free_buffers, taken_buffer
from cufa.planner.plan import Plan
from cufa.problem import Problem
from cufa.score import is_uneven
from cufa.specs import KERNELS
from cufa.specs.kv import LENGTHS
from cufa.specs.tile import panel_columns
from cufa.variant import Variant

_ROWS = 64  # of a box of Q or of O: a warpgroup's


class Loaded:
    """A variant that is ready to be launched on a device.

    Parameters
    ----------
    variant : Variant
    function : cupy.cuda.Function or Dependent
    device_id : int

    Attributes
    ----------
    layout : Layout
        Of its parameter.
    tma : bool
        Whether it reads and writes through tensor maps.
    columns, columns_v : int
        Of their boxes.
    counters : Counters or None
        For a kernel whose blocks take one tile after the other.
    draws_tiles : bool
        Whether blocks draw the tiles that wait for them, see ``kernels/scheduler_sm90.cuh``.
    """

    def __init__(self, variant: Variant, function: Any, device_id: int) -> None:
        kernel = KERNELS[variant.kernel]
        self.variant = variant
        self.function = function
        self.layout = Layout(variant)
        self.tma = kernel.tma
        self.columns = panel_columns(variant.head_dim)
        self.columns_v = panel_columns(variant.head_dim_v)
        self.counters = of_device(device_id) if kernel.persistent else None
        uneven = is_uneven(variant.score) or variant.kv in LENGTHS
        self.draws_tiles = kernel.persistent and uneven

    def reserve(self) -> None:
        """Make sure that launches find the memory they need; not while a graph is captured."""
        if self.counters is not None:
            self.counters.reserve()

    def ready(
        self,
        plan: Plan,
        problem: Problem,
        shapes: FourInts,
        strides: FourInts,
        address: int,
        beside: tuple[Any, ...],
    ) -> Launch:
        """Return a launch, see `Launch`."""
        return Launch(self, plan, problem, shapes, strides, address, beside)


class Launch:
    """A launch of which everything but the addresses is filled in.

    Parameters
    ----------
    loaded : Loaded
    plan : Plan
    problem : Problem
        Not empty, and with a scale that is not negative.
    shapes, strides : tuple of tuple of int
        Of q, k, v and the result, as 4-D (batch, heads, seq, head_dim) arrays that the kernel takes
        as they are; strides in bytes.
    address : int
        Of any such array: the driver makes no tensor map without, but each launch has its own.
    beside : tuple of tuple of int
        Of the arrays that parts of the score read, as `cufa.beside.placed` returns it.

    Attributes
    ----------
    loaded : Loaded
    plan : Plan
    """

    __slots__ = ("_bytes", "_constants", "_shapes", "_strides", "loaded", "plan")

    def __init__(
        self,
        loaded: Loaded,
        plan: Plan,
        problem: Problem,
        shapes: FourInts,
        strides: FourInts,
        address: int,
        beside: tuple[Any, ...] = (),
    ) -> None:
        self.loaded, self.plan = loaded, plan
        self._shapes, self._strides = shapes, strides
        _, grid, block, smem_bytes, q_tiles, _, _, pack, *_ = plan
        tiles = problem.batch * problem.heads_q // pack * q_tiles
        # Of fewer, each block's own: see next_tile in kernels/scheduler_sm90.cuh.
        draws = loaded.draws_tiles and tiles > 2 * grid
        layout = loaded.layout
        self._constants = (
            launcher(loaded.function, (grid, 1, 1), (block, 1, 1), smem_bytes),
            layout.nbytes,
            layout.places,
            layout.places_beside,
            loaded.counters if draws else None,
        )
        buffer = taken_buffer()
        if loaded.tma:
            q, k, v, out = shapes
            of_q, of_k, of_v, of_out = strides
            encode, dtype, variant = buffer.maps.encode, layout.dtype, loaded.variant
            bn, columns, columns_v = variant.bn, loaded.columns, loaded.columns_v
            encode(0, dtype, address, q, of_q, pack, _ROWS, columns)
            encode(1, dtype, address, k, of_k, 1, bn, columns)
            if of_v == of_k and v == k:  # V lies as K does
                buffer.maps.copy(1, 2)
            else:
                encode(2, dtype, address, v, of_v, 1, bn, columns_v)
            if of_out == of_q and out == q:  # and O as Q
                buffer.maps.copy(0, 3)
            else:
                encode(3, dtype, address, out, of_out, pack, _ROWS, columns_v)
        layout.fill(buffer.bytes, plan, problem, strides, beside)
        self._bytes = bytes(buffer.bytes[: layout.nbytes])
        free_buffers.append(buffer)

    @property
    def workspace_floats(self) -> int:
        """float32 numbers that each call gives memory for."""
        return self.plan.workspace_floats

    def with_keys(self, seq_kv: int, address: int) -> Launch:
        """Return the same launch but for the number of keys."""
        loaded, shapes, strides = self.loaded, self._shapes, self._strides
        layout, variant = loaded.layout, loaded.variant
        q, (batch, heads, _, head_dim), v, out = shapes
        k, v = (batch, heads, seq_kv, head_dim), (batch, heads, seq_kv, v[3])
        other = Launch.__new__(Launch)
        other.loaded, other.plan, other._constants = loaded, self.plan, self._constants
        other._shapes, other._strides = (q, k, v, out), strides
        buffer = taken_buffer()
        buffer.bytes[: layout.nbytes] = self._bytes
        if loaded.tma:
            encode, dtype, bn = buffer.maps.encode, layout.dtype, variant.bn
            encode(1, dtype, address, k, strides[1], 1, bn, loaded.columns)
            if strides[2] == strides[1] and v == k:
                buffer.maps.copy(1, 2)
            else:
                encode(2, dtype, address, v, strides[2], 1, bn, loaded.columns_v)
        layout.set_keys(buffer.bytes, seq_kv)
        other._bytes = bytes(buffer.bytes[: layout.nbytes])
        free_buffers.append(buffer)
        return other

    def __call__(self, q: int, k: int, v: int, out: int, lse: int, beside: Ints = ()) -> None:
        """Launch on the current stream.

        Parameters
        ----------
        q, k, v, out, lse : int
            Addresses; 0 where none is needed.
        beside : tuple of int
            Those of `cufa.score.ARRAYS`, of lengths and of a caller's own expressions, if any are
            read; or that of the workspace.
        """
        launch, nbytes, places, places_beside, counters = self._constants
        q_at, k_at, v_at, out_at, map_at, lse_at, tiles_drawn_at = places
        buffer = taken_buffer()
        buffer.bytes[:nbytes] = self._bytes
        words = buffer.words
        words[q_at] = q
        words[k_at] = k
        words[v_at] = v
        words[out_at] = words[map_at] = out
        words[lse_at] = lse
        for place, i in places_beside:
            words[place] = beside[i]
        if counters is not None:
            words[tiles_drawn_at] = counters.take()
        # When it returns, the driver has copied the parameter.
        launch(buffer)
        free_buffers.append(buffer)
        if low:
            refill()
