"""Plan -> launch: a kernel's parameter filled in, but for the addresses that each call gives."""

from __future__ import annotations

from typing import Any

from cufa.kernel import KERNELS, panel_columns
from cufa.launch import counters
from cufa.launch.params import Buffer, Layout, Strides, free_buffers
from cufa.planner.plan import Plan
from cufa.problem import Problem
from cufa.variant import Variant

_O_ROWS = 64  # of a box of O: a warpgroup's

# What a tensor map says: shape and strides of the array, and pack, rows and columns of a box.
_Map = tuple[tuple[int, ...], tuple[int, ...], int, int, int]


class Loaded:
    """A variant that is ready to be launched on a device.

    Parameters
    ----------
    variant : Variant
    function : cupy.cuda.Function
    device_id : int

    Attributes
    ----------
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
        self.counters = counters.of_device(device_id) if kernel.persistent else None
        self.draws_tiles = kernel.persistent and variant.causal


class Launch:
    """A launch of which everything but the addresses is filled in.

    Parameters
    ----------
    loaded : Loaded
    plan : Plan
    problem : Problem
        Not empty, and with a scale that is not negative.
    strides : tuple of tuple of int
        Of q, k, v and the result, as 4-D (batch, heads, seq, head_dim) arrays that the kernel takes
        as they are; in bytes.
    address : int
        Of any such array: the driver makes no tensor map without, but each launch has its own.

    Attributes
    ----------
    kernel : str
    workspace_floats : int
        float32 numbers for which each launch needs memory.
    """

    __slots__ = ("_bytes", "_constants", "_dtype", "_maps", "kernel", "workspace_floats")

    def __init__(
        self,
        loaded: Loaded,
        plan: Plan,
        problem: Problem,
        strides: Strides,
        address: int,
    ) -> None:
        layout = loaded.layout
        tiles = problem.batch * problem.heads_q // plan.pack * plan.q_tiles
        draws_tiles = loaded.draws_tiles and tiles > plan.grid
        self.kernel = loaded.variant.kernel
        self.workspace_floats = plan.workspace_floats
        self._dtype = problem.dtype
        self._constants = (
            loaded.function,
            (plan.grid, 1, 1),
            (plan.block, 1, 1),
            plan.smem_bytes,
            layout,
            layout.nbytes,
            layout.places,
            loaded.counters if draws_tiles else None,
        )
        self._maps = _maps(loaded, plan, problem, strides) if loaded.tma else ()
        buffer = _taken()
        for i, each in enumerate(self._maps):
            same = self._maps.index(each)
            if same < i:  # V may lie as K does, and O as Q
                buffer.copy_map(same, i)
            else:
                buffer.maps.encode(i, problem.dtype, address, *each)
        layout.fill(buffer.bytes, plan, problem, strides)
        self._bytes = bytes(buffer.bytes[: layout.nbytes])
        free_buffers.append(buffer)

    def with_keys(self, seq_kv: int, address: int) -> Launch:
        """Return the same launch but for the number of keys."""
        other = Launch.__new__(Launch)
        other.kernel, other.workspace_floats = self.kernel, self.workspace_floats
        other._dtype, other._constants = self._dtype, self._constants
        other._maps = self._maps
        layout: Layout = self._constants[4]
        buffer = _taken()
        buffer.bytes[: layout.nbytes] = self._bytes
        if self._maps:
            of_q, of_k, of_v, of_out = self._maps
            of_k, of_v = _with_keys(of_k, seq_kv), _with_keys(of_v, seq_kv)
            other._maps = (of_q, of_k, of_v, of_out)
            buffer.maps.encode(1, self._dtype, address, *of_k)
            if of_v == of_k:
                buffer.copy_map(1, 2)
            else:
                buffer.maps.encode(2, self._dtype, address, *of_v)
        layout.set_keys(buffer.bytes, seq_kv)
        other._bytes = bytes(buffer.bytes[: layout.nbytes])
        free_buffers.append(buffer)
        return other

    def __call__(self, q: int, k: int, v: int, out: int, lse: int, workspace: int = 0) -> None:
        """Launch on the current stream with these addresses; 0 where none is needed."""
        function, grid, block, smem_bytes, _, nbytes, places, counters = self._constants
        q_at, k_at, v_at, out_at, map_at, lse_at, workspace_at, tiles_drawn_at = places
        buffer = _taken()
        buffer.bytes[:nbytes] = self._bytes
        words = buffer.words
        words[q_at] = q
        words[k_at] = k
        words[v_at] = v
        words[out_at] = words[map_at] = out
        words[lse_at] = lse
        if workspace:
            words[workspace_at] = workspace
        if counters is not None:
            words[tiles_drawn_at] = counters.take()
        # When it returns, the driver has copied the parameter.
        function(grid, block, buffer.args, smem_bytes)
        free_buffers.append(buffer)


def _taken() -> Buffer:
    """Return a buffer that is nobody else's until it is among the free ones again."""
    try:
        return free_buffers.pop()  # in one step, whatever other threads do
    except IndexError:
        return Buffer()


def _maps(loaded: Loaded, plan: Plan, problem: Problem, strides: Strides) -> tuple[_Map, ...]:
    """Return ``TensorMaps`` of ``kernels/tile_sm90.cuh``."""
    _, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v, _, _ = problem
    variant, pack, columns, columns_v = loaded.variant, plan.pack, loaded.columns, loaded.columns_v
    of_q, of_k, of_v, of_out = strides
    bm, bn = variant.bm, variant.bn
    return (
        ((batch, heads_q, seq_q, head_dim), of_q, pack, bm, columns),
        ((batch, heads_kv, seq_kv, head_dim), of_k, 1, bn, columns),
        ((batch, heads_kv, seq_kv, head_dim_v), of_v, 1, bn, columns_v),
        ((batch, heads_q, seq_q, head_dim_v), of_out, pack, _O_ROWS, columns_v),
    )


def _with_keys(of_kv: _Map, seq_kv: int) -> _Map:
    (batch, heads, _, head_dim), strides, pack, rows, columns = of_kv
    return (batch, heads, seq_kv, head_dim), strides, pack, rows, columns
