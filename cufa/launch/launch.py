"""Plan + CuPy arrays -> launch: the by-value Params struct and the hot-path cache."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cufa.arrays import (
    ALIGNMENT,
    Operands,
    as_bhsd,
    as_readable,
    copied,
    extent,
    padded,
    readable,
)
from cufa.compiler import jit
from cufa.device import Device
from cufa.kernel import KERNELS, panel_columns
from cufa.launch import tensor_map
from cufa.planner.plan import Plan
from cufa.problem import Problem, restore_shape

_TENSOR = [("data", "u8"), ("stride_batch", "i8"), ("stride_head", "i8"), ("stride_seq", "i8")]
PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in "qkvo"),
        ("lse", "u8"),
        ("workspace", "u8"),
        ("tiles_drawn", "u8"),
        ("scale_log2", "f4"),
        *(
            (name, "i4")
            for name in (
                *("heads_q", "group", "seq_q", "seq_kv", "head_dim", "head_dim_v"),
                *("q_tiles", "heads", "section_heads", "late_rows", "pack_log2"),
            )
        ),
    ],
    align=True,
)
"""The layout of ``Params`` in ``kernels/params.cuh``."""

_CACHE_SIZE = 4096
_TINY = float(np.finfo(np.float32).tiny)

_Key = tuple[Any, ...]


class _Addresses(NamedTuple):
    """Where the addresses are among the words of the parameters."""

    q: int
    k: int
    v: int
    out: int
    lse: int
    workspace: int
    tiles_drawn: int
    map_out: int

    @classmethod
    def of(cls, map_words: int) -> _Addresses:
        """Return the places behind so many words of tensor maps, which may be none."""
        q, k, v, out, lse, workspace, tiles_drawn = (
            map_words + PARAMS.fields[name][1] // 8  # type: ignore[index]
            for name in ("q", "k", "v", "o", "lse", "workspace", "tiles_drawn")
        )
        if not map_words:
            return cls(q, k, v, out, lse, workspace, tiles_drawn, out)
        # TMA needs the addresses of Q, K and V in its maps only, that of O in both.
        of_q, of_k, of_v, of_out = range(0, map_words, tensor_map.WORDS)
        return cls(of_q, of_k, of_v, out, lse, workspace, tiles_drawn, of_out)


class Launch:
    """A call made ready: everything but the addresses is filled in.

    Parameters
    ----------
    plan : Plan
    problem : Problem
    views : Operands
        4-D arrays that the kernel takes as they are, the result as `out` among them.
    kernel : cupy.cuda.Function
    """

    def __init__(self, plan: Plan, problem: Problem, views: Operands, kernel: Any) -> None:
        params = np.zeros(1, PARAMS)
        for name, view in zip("qkvo", views, strict=True):
            for axis, stride in zip(("batch", "head", "seq"), view.strides, strict=False):
                params[name][f"stride_{axis}"] = stride // view.itemsize
        # Zero would make NaN of a masked score, -inf * 0; the least normal number keeps it -inf.
        params["scale_log2"] = max(problem.scale * math.log2(math.e), _TINY)
        # To the kernel, heads whose rows are packed are one.
        params["heads"] = problem.batch * problem.heads_q // plan.pack
        params["heads_q"] = problem.heads_q // plan.pack
        params["group"] = problem.group // plan.pack
        for name in ("seq_q", "seq_kv", "head_dim", "head_dim_v"):
            params[name] = getattr(problem, name)
        params["pack_log2"] = plan.pack.bit_length() - 1  # a power of two
        for name in ("q_tiles", "section_heads", "late_rows"):
            params[name] = getattr(plan, name)
        maps = _tensor_maps(plan, views) if uses_tma(plan) else np.empty(0, np.uint64)
        # With maps it is TmaArguments of kernels/tile_sm90.cuh, a multiple of a map's alignment.
        end = np.zeros(-PARAMS.itemsize // 8 % 8 if maps.size else 0, np.uint64)
        words = np.concatenate([maps, params.view(np.uint64), end])
        self._words = words
        self._args = (words.view(f"V{words.nbytes}"),)
        self._addresses = _Addresses.of(maps.size)
        self._draws_tiles = _draws_tiles(plan, problem)
        self._kernel = kernel
        self._grid, self._block = (plan.grid,), (plan.block,)
        self._smem_bytes = plan.smem_bytes
        self._workspace_floats = plan.workspace_floats
        self._lock = threading.Lock()

    def __call__(self, q: int, k: int, v: int, out: int, lse: int) -> None:
        """Launch on the current stream with these addresses; `lse` may be 0."""
        workspace = 0
        if self._workspace_floats:
            memory = _ndarray(self._workspace_floats, np.float32)
            _keep_if_captured(memory)
            workspace = memory.data.ptr
        words, at = self._words, self._addresses
        with self._lock:  # the driver has copied the parameters when the launch returns
            words[at.q] = q
            words[at.k] = k
            words[at.v] = v
            words[at.out] = out
            words[at.map_out] = out
            words[at.lse] = lse
            if workspace:
                words[at.workspace] = workspace
            if self._draws_tiles:
                words[at.tiles_drawn] = _counter_address()
            self._kernel(self._grid, self._block, self._args, self._smem_bytes)


class _Ready(NamedTuple):
    launch: Launch
    shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    dtype: np.dtype
    alignment: int  # of out, in bytes
    spans: tuple[tuple[int, int], ...]  # of out, q, k and v


_cupy: Any = None  # imported by the first call with CuPy arrays
_ndarray: Any = None
_ready: dict[_Key, _Ready] = {}
_captured: list[Any] = []


def _keep_if_captured(*temporaries: Any) -> None:
    """Keep memory that a CUDA graph under capture uses: it may be replayed as long as we live."""
    if _cupy.cuda.get_current_stream().is_capturing():
        _captured.extend(temporaries)


def uses_tma(plan: Plan) -> bool:
    """Whether a plan's kernel reads and writes through tensor maps."""
    return KERNELS[plan.variant.kernel].tma


def _draws_tiles(plan: Plan, problem: Problem) -> bool:
    """Whether the blocks draw their tiles, as ``kernels/scheduler_sm90.cuh`` says."""
    tiles = problem.batch * problem.heads_q // plan.pack * plan.q_tiles
    persistent = KERNELS[plan.variant.kernel].persistent
    return persistent and problem.causal and tiles > plan.grid


def _tensor_maps(plan: Plan, views: Operands) -> np.ndarray:
    """Return ``TensorMaps`` of ``kernels/tile_sm90.cuh`` as words."""
    v = plan.variant
    columns, columns_v = panel_columns(v.head_dim), panel_columns(v.head_dim_v)
    return np.concatenate(
        [
            tensor_map.encode(views.q, plan.pack, v.bm, columns),
            tensor_map.encode(views.k, 1, v.bn, columns),
            tensor_map.encode(views.v, 1, v.bn, columns_v),
            tensor_map.encode(views.out, plan.pack, 64, columns_v),  # a warpgroup's rows
        ]
    )


# More than a stream can have kernels waiting: another stream may come to have the name of one that
# is gone, and so its counters, while kernels of that still run.
_COUNTERS = 4096


class _Counters(NamedTuple):
    """The counters of a stream, of which each launch takes the next."""

    words: Any
    addresses: Iterator[int]  # of the words, round and round


_counters: dict[tuple[int, int, int], _Counters] = {}
_PER_THREAD_STREAM = 2  # cudaStreamPerThread


def _counter_address() -> int:
    """Return the address of a counter that is 0 when the next kernel of this stream begins.

    Kernels leave it at 0, and those of a stream follow each other. A graph may be replayed beside
    its stream, and so has counters of its own.
    """
    stream = _cupy.cuda.get_current_stream()
    if stream.is_capturing():
        counter = _cupy.zeros(1, np.int32)
        _captured.append(counter)
        return int(counter.data.ptr)
    thread = threading.get_ident() if stream.ptr == _PER_THREAD_STREAM else 0
    key = (_cupy.cuda.runtime.getDevice(), stream.ptr, thread)
    counters = _counters.get(key)
    if counters is None:
        words = _zeros(_COUNTERS)
        first = int(words.data.ptr)
        made = _Counters(words, itertools.cycle(range(first, first + 4 * _COUNTERS, 4)))
        counters = _counters.setdefault(key, made)  # of another thread, perhaps
    return next(counters.addresses)


def _zeros(count: int) -> Any:
    """Return integers that are 0 for all streams, whatever they have under way."""
    cuda = _cupy.cuda
    memory = cuda.Memory(4 * count)  # not of the pool, whose memory may wait for its last use
    stream = cuda.runtime.streamCreateWithFlags(cuda.runtime.streamNonBlocking)
    cuda.runtime.memsetAsync(memory.ptr, 0, 4 * count, stream)
    cuda.runtime.streamSynchronize(stream)
    cuda.runtime.streamDestroy(stream)
    return _cupy.ndarray(count, np.int32, cuda.MemoryPointer(memory, 0))


def again(q: Any, k: Any, v: Any, out: Any, return_lse: bool, options: _Key) -> Any:
    """Run a call whose like `first` has run, or return None.

    It looks only at what can differ between two such calls: shapes, strides, dtypes, the device,
    the alignment and, where `out` is given, whether it is clear of the inputs.
    """
    if not (type(q) is type(k) is type(v) is _ndarray and (out is None or type(out) is _ndarray)):
        return None
    q_data, k_data, v_data = q.data, k.data, v.data
    q_ptr, k_ptr, v_ptr = q_data.ptr, k_data.ptr, v_data.ptr
    device = _cupy.cuda.runtime.getDevice()
    if (q_ptr | k_ptr | v_ptr) % ALIGNMENT or not (
        q_data.device_id == k_data.device_id == v_data.device_id == device
    ):
        return None
    try:
        ready = _ready.get(_key(q, k, v, out, device, options))
    except TypeError:  # an option that cannot be hashed: `parse` will refuse it
        return None
    if ready is None:
        return None
    if out is None:
        out = _ndarray(ready.shape, ready.dtype)
    elif (
        out.data.device_id != device
        or out.data.ptr % ready.alignment
        or not _clear(ready.spans, out.data.ptr, q_ptr, k_ptr, v_ptr)
    ):
        return None
    if not return_lse:
        ready.launch(q_ptr, k_ptr, v_ptr, out.data.ptr, 0)
        return out
    lse = _ndarray(ready.lse_shape, np.float32)
    ready.launch(q_ptr, k_ptr, v_ptr, out.data.ptr, lse.data.ptr)
    return out, lse


def _key(q: Any, k: Any, v: Any, out: Any, device: int, options: _Key) -> _Key:
    inputs = (q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype)
    if out is None:
        return (inputs, device, options)
    return (inputs, device, options, out.shape, out.strides, out.dtype)


def _spans(*arrays: Any) -> tuple[tuple[int, int], ...]:
    """Return where each array begins and ends, counted from its address."""
    return tuple(extent(array.shape, array.strides, array.itemsize) for array in arrays)


def _clear(spans: tuple[tuple[int, int], ...], out: int, *inputs: int) -> bool:
    """Whether an output at `out` touches none of the inputs; `spans` are the first call's."""
    low, high = spans[0][0] + out, spans[0][1] + out
    for (first, end), address in zip(spans[1:], inputs, strict=True):
        if address + first < high and low < address + end:
            return False
    return True


def bind() -> Any:
    """Import CuPy, which launches need, and return it."""
    global _cupy, _ndarray
    import cupy

    _cupy, _ndarray = cupy, cupy.ndarray
    return cupy


class Arrays(NamedTuple):
    """A call's arrays as the user gave them; `out` may be None."""

    q: Any
    k: Any
    v: Any
    out: Any
    layout: str


def first(
    arrays: Arrays,
    return_lse: bool,
    options: _Key,
    problem: Problem,
    operands: Operands,
    plan: Plan,
    device: Device,
) -> Any:
    """Run a call of a new kind: compile the kernel, copy what it cannot take, remember the rest."""
    cupy = bind()
    q, k, v, out, layout = arrays
    shape, lse_shape = restore_shape(problem, q.ndim, layout)
    result = cupy.empty(shape, q.dtype) if out is None else out
    lse = cupy.empty(lse_shape, np.float32) if return_lse else None
    if result.size:
        device_id = cupy.cuda.runtime.getDevice()
        kernel = jit.kernel(plan.variant, device, device_id)
        tma = uses_tma(plan)
        negative = problem.scale < 0  # the kernels fold a positive scale into the exponent
        problem = problem._replace(scale=abs(problem.scale))
        q_view = copied(operands.q, negate=True) if negative else as_readable(operands.q, tma)
        out_view = as_bhsd(result, layout)
        if not _writable(out_view, tma):
            out_view = padded(out_view.shape, out_view.dtype, cupy.empty)
        k_view, v_view = as_readable(operands.k, tma), as_readable(operands.v, tma)
        taken = Operands(q_view, k_view, v_view, out_view)
        launch = Launch(plan, problem, taken, kernel)
        q_ptr, k_ptr, v_ptr, out_ptr = (view.data.ptr for view in taken)
        launch(q_ptr, k_ptr, v_ptr, out_ptr, 0 if lse is None else lse.data.ptr)
        if out_ptr != result.data.ptr:
            as_bhsd(result, layout)[...] = taken.out
        copies = any(a is not b for a, b in zip(taken[:3], operands[:3], strict=True))
        if copies or out_ptr != result.data.ptr:
            _keep_if_captured(*taken)
        else:
            if len(_ready) >= _CACHE_SIZE:
                _ready.clear()
            _ready[_key(q, k, v, out, device_id, options)] = _Ready(
                launch,
                shape,
                lse_shape,
                q.dtype,
                ALIGNMENT if tma else q.dtype.itemsize,
                _spans(result, q, k, v),
            )
    return (result, lse) if return_lse else result


def _writable(view: Any, tma: bool) -> bool:
    """Whether a kernel writes a 4-D array as it is: rows are contiguous, and for TMA aligned."""
    if tma:
        aligned = view.data.ptr % ALIGNMENT == 0
        return aligned and readable(view.shape, view.strides, view.itemsize, tma)
    return view.strides[3] == view.itemsize or view.shape[3] == 1
