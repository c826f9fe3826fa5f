"""A GPU that the host plays: CuPy arrays in host memory, a driver, kernels that are the oracle.

A kernel finds its arrays as a CUDA kernel does, from the words of its parameter alone; it asserts
what the CUDA kernels rely on, and computes with the oracle.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from reference import DTYPES, oracle

from cufa import device
from cufa.api import arguments
from cufa.arrays import ALIGNMENT
from cufa.compiler import jit
from cufa.launch import (
    append,
    backward,
    calls,
    clear_rows,
    counters,
    fp8,
    fp8_calls,
    gradient_calls,
    params,
    quantize,
    scratch,
    tensor_map,
)
from cufa.problem.parse import parse
from cufa.specs import KERNELS
from cufa.specs.instance import Instance
from cufa.specs.tile import panel_columns
from cufa.specs.variant import BackwardVariant, Fp8Variant, Variant

# --- the driver ---

#: CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion of cuda.h.
TYPES = {6: "float16", 9: "bfloat16"}
SWIZZLE_BYTES = {1: 32, 2: 64, 3: 128}
L2_128B = 2
INVALID_VALUE, INVALID_CONTEXT = 1, 201  # CUresult

POINTER, INT, UNSIGNED = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
ENCODE_TILED = ctypes.CFUNCTYPE(
    INT, *(POINTER, INT, UNSIGNED), *[POINTER] * 5, *(INT, INT, INT, INT)
)


class Encoded(NamedTuple):
    """A tensor map, the innermost axis first; strides are in bytes."""

    dtype: np.dtype
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int

    def array(self, address: int) -> np.ndarray:
        """Return the elements, the outermost axis first, of such an array at an address."""
        strides = (*self.strides[::-1], self.dtype.itemsize)
        return at(address, self.sizes[::-1], strides, self.dtype)


class Driver:
    """Stands for the CUDA driver, and refuses what it documents to refuse.

    A map holds address, sizes, strides, box and swizzle, as ``emulator/ptx_sm90.cuh`` reads them.
    """

    def __init__(self) -> None:
        self.encoded: list[Encoded] = []
        self.address_moved_by = 0
        self.has_context = True
        self.function = ENCODE_TILED(self.encode)

    def encode(
        self,
        place: int,
        dtype: int,
        rank: int,
        address: int,
        sizes: int,
        strides: int,
        box: int,
        element_strides: int,
        interleave: int,
        swizzle: int,
        l2_promotion: int,
        fill: int,
    ) -> int:
        """Stand for `cuTensorMapEncodeTiled`, as foreign code that raises nothing."""

        def numbers(there: int, kind: Any, count: int) -> tuple[int, ...]:
            return tuple((kind * count).from_address(there))

        if not self.has_context:
            return INVALID_CONTEXT
        legal = (
            3 <= rank <= 5
            and place % 64 == 0
            and address % 16 == 0
            and numbers(element_strides, ctypes.c_uint32, rank) == (1,) * rank
            and (interleave, l2_promotion, fill) == (0, L2_128B, 0)
            and {dtype} <= set(TYPES)
            and {swizzle} <= set(SWIZZLE_BYTES)
        )
        if not legal:
            return INVALID_VALUE
        found = Encoded(
            DTYPES[TYPES[dtype]],
            address,
            numbers(sizes, ctypes.c_uint64, rank),
            numbers(strides, ctypes.c_uint64, rank - 1),
            numbers(box, ctypes.c_uint32, rank),
            SWIZZLE_BYTES[swizzle],
        )
        legal = (
            all(0 < n <= 2**32 for n in found.sizes)
            and all(0 < n < 2**40 and n % 16 == 0 for n in found.strides)
            and all(0 < n <= 256 for n in found.box)
            and found.box[0] * found.dtype.itemsize == found.swizzle_bytes
        )
        if not legal:
            return INVALID_VALUE
        none = 5 - rank
        (ctypes.c_uint64 * 16).from_address(place)[:] = [
            found.address + self.address_moved_by,
            *(*found.sizes, *[1] * none),
            *(*found.strides, *[0] * none),
            *(*found.box, *[1] * none),
            found.swizzle_bytes | dtype << 32,
        ]
        self.encoded.append(found)
        return 0

    @staticmethod
    def described(words: np.ndarray) -> Encoded:
        """Return what a map says, with the address that is in it now."""
        address, *numbers = (int(word) for word in words)
        sizes, strides, box = numbers[:5], numbers[5:9], numbers[9:14]
        dtype, swizzle_bytes = divmod(numbers[14], 1 << 32)
        return Encoded(
            DTYPES[TYPES[dtype]], address, tuple(sizes), tuple(strides), tuple(box), swizzle_bytes
        )


# --- arrays ---


def at(address: int, shape: Any, strides: Any, dtype: np.dtype) -> np.ndarray:
    """Return the elements of an array somewhere in memory."""
    memory = SimpleNamespace(
        __array_interface__={
            "version": 3,
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": f"|V{dtype.itemsize}",
            "data": (address, False),
        }
    )
    return np.asarray(memory).view(dtype)


def new_memory(nbytes: int) -> np.ndarray:
    """Return memory of NaN that begins at a multiple of 512 bytes."""
    memory = np.full(nbytes + 512, 0xFF, np.uint8)
    start = -memory.ctypes.data % 512
    return memory[start : start + nbytes]


class Array:
    """Stands for `cupy.ndarray`: new memory holds NaN."""

    def __init__(self, shape: Any, dtype: Any = np.float32, host: np.ndarray | None = None) -> None:
        self.device_id = GPU.current
        if host is None:
            dtype = np.dtype(dtype)
            nbytes = int(np.prod(shape)) * dtype.itemsize
            host = new_memory(nbytes).view(dtype).reshape(shape)
            GPU.allocated.append(host.shape)
        self.host = host

    def __getattr__(self, name: str) -> Any:
        """Return what NumPy knows, too."""
        known = ("shape", "strides", "dtype", "ndim", "size", "itemsize", "nbytes", "flags", "base")
        assert name in known, name
        return getattr(self.host, name)

    @property
    def data(self) -> Any:
        """Address and device, as in `cupy.cuda.MemoryPointer`."""
        address = self.host.ctypes.data

        def copy_from_host_async(there: int, nbytes: int, stream: Stream) -> None:
            assert stream is GPU.stream
            ctypes.memmove(address, there, nbytes)

        return SimpleNamespace(
            ptr=address, device_id=self.device_id, copy_from_host_async=copy_from_host_async
        )

    def view_of(self, host: np.ndarray) -> Array:
        """Return an array on this device that is some view of host memory."""
        view = Array(host.shape, host.dtype, host)
        view.device_id = self.device_id
        return view

    def __getitem__(self, key: Any) -> Array:
        """View, or copy where indices are an array."""
        return self.view_of(self.host[self._there(key)])

    def __setitem__(self, key: Any, value: Array) -> None:
        """Copy there."""
        self.host[self._there(key)] = value.host

    @staticmethod
    def _there(key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        return tuple(each.host if isinstance(each, Array) else each for each in keys)

    def __deepcopy__(self, _: Any) -> Array:
        """Copy."""
        return on_gpu(self.host)

    def __neg__(self) -> Array:
        """Copy with the other sign."""
        return on_gpu(-self.host)

    def fill(self, value: Any) -> None:
        """Write a value everywhere."""
        self.host.fill(value)

    def __xor__(self, other: Any) -> Array:
        """Bits that differ."""
        return on_gpu(self.host ^ other)

    def view(self, dtype: Any) -> Array:
        """View of the same memory as another dtype."""
        return self.view_of(self.host.view(dtype))

    def reshape(self, *shape: Any) -> Array:
        """View, or copy where there is no such view, with other axes."""
        return self.view_of(self.host.reshape(*shape))

    def transpose(self, *axes: int) -> Array:
        """View with the axes in another order."""
        return self.view_of(self.host.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> Array:
        """View with two axes exchanged."""
        return self.view_of(self.host.swapaxes(a, b))

    def __add__(self, other: Any) -> Array:
        """Sum."""
        return on_gpu(self.host + other)

    def astype(self, dtype: Any) -> Array:
        """Copy of another dtype."""
        return on_gpu(self.host.astype(dtype))

    def clip(self, least: int, most: int) -> Array:
        """Copy within bounds."""
        return on_gpu(self.host.clip(least, most))

    def ravel(self) -> Array:
        """View with one axis."""
        assert self.host.flags.c_contiguous
        return self.view_of(self.host.reshape(-1))

    def get(self) -> np.ndarray:
        """Host array of the values."""
        return self.host.copy()


def on_gpu(host: np.ndarray) -> Array:
    """Copy of a host array in memory of its own; one that is there already is itself."""
    if isinstance(host, Array):
        return host
    array = Array(host.shape, host.dtype)
    array.host[...] = host
    return array


def contiguous(array: Array, dtype: Any = None) -> Array:
    """Stand for `cupy.ascontiguousarray`."""
    host = np.ascontiguousarray(array.host, dtype)
    return array if host is array.host else on_gpu(host)


def as_strided(array: Array, shape: Any, strides: Any) -> Array:
    """Stand for `cupy.lib.stride_tricks.as_strided`."""
    return array.view_of(np.lib.stride_tricks.as_strided(array.host, shape, strides))


def one_in(host: np.ndarray) -> Array:
    """Contiguous array that begins one element after an aligned address."""
    flat = on_gpu(np.append(host.ravel()[:1], host))
    return flat.view_of(flat.host[1:].reshape(host.shape))


def zeros(shape: Any, dtype: Any) -> Array:
    """Stand for `cupy.zeros`."""
    if GPU.slow:
        time.sleep(0.002)
    return on_gpu(np.zeros(shape, dtype))


def negative(array: Array, out: Array) -> None:
    """Stand for `cupy.negative`."""
    out.host[...] = -array.host


# --- kernels ---


def elements(tensor: np.void, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Find the elements of a `Tensor` of Params; the last axis is contiguous."""
    size = dtype.itemsize
    strides = [int(tensor[f"stride_{axis}"]) * size for axis in ("batch", "head", "seq")]
    return at(int(tensor["data"]), shape, (*strides, size), dtype)


def loaded(
    tensor: np.void, shape: tuple[int, ...], dtype: np.dtype, surplus: float | None = 0
) -> np.ndarray:
    """Find an array as the kernels load it: in aligned chunks, and what is beyond a row in them."""
    chunk = ALIGNMENT // dtype.itemsize
    chunks = (*shape[:3], -(-shape[3] // chunk) * chunk)
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    array = elements(tensor, chunks, dtype)
    assert array.ctypes.data % ALIGNMENT == 0
    for n, stride in zip(array.shape[:3], array.strides[:3], strict=True):
        assert n == 1 or stride % ALIGNMENT == 0, "rows are not aligned"
    if surplus is not None:
        assert np.all(array[..., shape[3] :] == surplus), "the surplus of a row is not 0"
    return array[..., : shape[3]]


class Kernel:
    """Stands for a compiled kernel."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.dtype = variant.parameter

    def __call__(self, grid: Any, block: Any, args: Any, smem_bytes: int) -> None:
        """Stand for a launch."""
        GPU.launches.append(self.variant)
        if GPU.slow:
            time.sleep(0.002)  # another thread may run here
        assert block == (self.variant.threads, 1, 1)
        assert smem_bytes == self.variant.smem_bytes
        (pointer,) = args
        parameter = at(pointer.ptr, (1,), (self.dtype.itemsize,), self.dtype)[0]
        if KERNELS[self.variant.kernel].tma:
            assert pointer.ptr % 64 == 0
            self._run_with_tma(grid, parameter["maps"], parameter["params"])
        else:
            self._run(grid, parameter["params"])

    def _run(self, grid: Any, p: np.void) -> None:
        variant = self.variant
        batch, heads_q, heads_kv, d, dv = self._sizes(p)
        heads, seq_q, seq_kv = batch * heads_q, int(p["seq_q"]), int(p["seq_kv"])
        if KERNELS[variant.kernel].workspace:
            assert grid == (heads, 1, 1)
            floats = (2 * heads * seq_q,)
            at(int(p["workspace"]), floats, (4,), np.dtype(np.float32))[...] = 0
        else:
            assert grid == (heads * int(p["q_tiles"]), 1, 1)
            assert p["workspace"] == 0
        assert p["tiles_drawn"] == 0
        assert p["pack_log2"] == 0
        dtype = DTYPES[variant.dtype]
        out = self._computed(
            p,
            loaded(p["q"], (batch, heads_q, seq_q, d), dtype),
            loaded(p["k"], (batch, heads_kv, seq_kv, d), dtype),
            loaded(p["v"], (batch, heads_kv, seq_kv, dv), dtype),
        )
        elements(p["o"], out.shape, dtype)[...] = out

    def _run_with_tma(self, grid: Any, maps: np.void, p: np.void) -> None:
        variant = self.variant
        # To this kernel, heads whose rows are packed are one.
        pack, q_tiles = 1 << int(p["pack_log2"]), int(p["q_tiles"])
        batch, heads, heads_kv, d, dv = self._sizes(p)
        tiles = batch * heads * q_tiles
        blocks = device.of_id(GPU.current).sm_count * variant.blocks_per_sm
        assert grid == (min(tiles, blocks), 1, 1)
        assert q_tiles == -(-int(p["seq_q"]) * pack // variant.bm)
        assert p["workspace"] == 0
        GPU.counters.append(int(p["tiles_drawn"]))
        assert (p["tiles_drawn"] != 0) == (variant.causal and tiles > 2 * grid[0])
        if p["tiles_drawn"]:
            assert at(int(p["tiles_drawn"]), (1,), (4,), np.dtype(np.int32)) == [0]

        columns, columns_v = panel_columns(variant.head_dim), panel_columns(variant.head_dim_v)
        q = self._rows(maps["q"], (columns, pack, 64 // pack, 1, 1))
        k = self._rows(maps["k"], (columns, 1, variant.bn, 1, 1))
        v = self._rows(maps["v"], (columns_v, 1, variant.bn, 1, 1))
        o = self._rows(maps["o"], (columns_v, pack, 64 // pack, 1, 1))
        assert q.shape == (batch, heads, pack, p["seq_q"], d)
        kv = (batch, heads_kv, 1, int(p["seq_kv"]))
        k = self._repeated(k, p["k"], (*kv, d))
        v = self._repeated(v, p["v"], (*kv, dv))
        out = self._computed(p, *(x.reshape(batch, -1, *x.shape[3:]) for x in (q, k, v)))
        o[...] = out.reshape(o.shape)
        # Where shared memory has no room for O, it is written without TMA, in aligned chunks.
        there = loaded(p["o"], out.shape, out.dtype, surplus=None)
        np.testing.assert_array_equal(there, out)

    @staticmethod
    def _rows(map_words: np.ndarray, box: tuple[int, ...]) -> np.ndarray:
        """Find an array as TMA does, with the axes (batch, heads / pack, pack, seq, head_dim)."""
        said: Encoded = GPU.driver.described(map_words)
        assert said.box == box
        return np.moveaxis(said.array(said.address), 3, 2)

    @staticmethod
    def _repeated(array: np.ndarray, tensor: np.void, shape: tuple[int, ...]) -> np.ndarray:
        """Return K or V as its tiles are fetched: where the stride is 0, always the first."""
        for axis, name in enumerate(("batch", "head")):
            assert array.shape[axis] == (shape[axis] if tensor[f"stride_{name}"] else 1)
        assert array.shape[2:] == shape[2:]
        return np.broadcast_to(array, shape)

    def _sizes(self, p: np.void) -> tuple[int, ...]:
        """Return batch, heads of Q and of K/V, and the head dims."""
        heads, heads_q, group = int(p["heads"]), int(p["heads_q"]), int(p["group"])
        return heads // heads_q, heads_q, heads_q // group, int(p["head_dim"]), int(p["head_dim_v"])

    def _computed(self, p: np.void, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Return the result, and write the log-sum-exp."""
        assert p["section_heads"] > 0
        assert p["scale_log2"] > 0
        scale = float(p["scale_log2"]) * math.log(2)
        out, lse = oracle(q, k, v, causal=self.variant.causal, scale=scale)
        if p["lse"]:
            at(int(p["lse"]), (lse.size,), (4,), np.dtype(np.float32))[...] = lse.ravel()
        return out.astype(DTYPES[self.variant.dtype])


# --- the GPU ---


class Stream:
    """Stands for a CuPy stream."""

    def __init__(self, capturing: bool = False, ptr: int = 0) -> None:
        self.capturing, self.ptr = capturing, ptr

    def is_capturing(self) -> bool:
        """Whether it is being captured."""
        return self.capturing


class Event:
    """Stands for a CuPy event; the device is always two events behind."""

    def __init__(self, disable_timing: bool) -> None:
        assert disable_timing
        self.number = 0

    def record(self, stream: Stream) -> None:
        """Stand for the recording of an event."""
        assert stream is GPU.stream
        GPU.events += 1
        self.number = GPU.events

    @property
    def done(self) -> bool:
        """Whether what is in front of it is over."""
        return GPU.events >= self.number + 2


class Pinned(np.ndarray):
    """Stands for pinned memory."""

    @property
    def ptr(self) -> int:
        """The address."""
        return self.ctypes.data


class Gpu:
    """The calls of the played GPU, and its current device and stream."""

    current = 0
    slow = False

    def __init__(self) -> None:
        self.driver = Driver()
        self.stream = Stream()
        self.allocated: list[tuple[int, ...]] = []  # shapes
        self.filled_memory: list[np.ndarray] = []  # of counters, and for captures
        self.counters: list[int] = []  # addresses, of launches with TMA
        self.scratch: list[int] = []  # addresses of what blocks share, of launches that decode
        self.launches: list[Any] = []  # variants and instances
        self.loaded: list[Variant] = []  # kernels that were asked for
        self.events = 0  # that were recorded
        self.parsed = 0  # calls that were checked in full, and not of a known kind

    def kernel(self, variant: Variant | Instance, _gpu: device.Device, device_id: int) -> Any:
        """Stand for `jit.kernel`."""
        from played_decode import DecodeKernel

        assert device_id == self.current
        # Results of these are looked at where they are emulated.
        if isinstance(variant, (Instance, BackwardVariant, Fp8Variant)):
            return lambda *_: self.launches.append(variant)
        self.loaded.append(variant)
        return (DecodeKernel if KERNELS[variant.kernel].decodes else Kernel)(variant)

    def parse(self, *args: Any, **options: Any) -> Any:
        """Stand for `parse`."""
        self.parsed += 1
        return parse(*args, **options)

    def filled(self, nbytes: int, byte: int) -> Any:
        """Stand for `counters.filled`."""
        if self.slow:
            time.sleep(0.002)
        assert not self.stream.is_capturing()
        self.filled_memory.append(np.full(nbytes, byte, np.uint8))
        return SimpleNamespace(ptr=self.filled_memory[-1].ctypes.data)

    def alloc(self, nbytes: int) -> Any:
        """Stand for `cupy.cuda.alloc`."""
        array = Array(nbytes, np.uint8)
        return SimpleNamespace(
            ptr=array.data.ptr, memset_async=lambda byte, n: array.host[:n].fill(byte), array=array
        )

    def cupy(self) -> Any:
        """Return what stands for the module."""
        cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: self.current),
            get_current_stream=lambda: self.stream,
            Stream=Stream,
            alloc=self.alloc,
            alloc_pinned_memory=lambda nbytes: np.full(nbytes, 0xFF, np.uint8).view(Pinned),
            Event=Event,
            function=SimpleNamespace(CPointer=lambda address: SimpleNamespace(ptr=address)),
        )
        return SimpleNamespace(
            **{"__name__": "cupy", "ndarray": Array, "empty": Array, "zeros": zeros},
            **{"negative": negative, "asarray": on_gpu, "ascontiguousarray": contiguous},
            lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided)),
            broadcast_to=lambda x, shape: x.view_of(np.broadcast_to(x.host, shape)),
            resize=lambda x, shape: on_gpu(np.resize(x.host, shape)),
            cuda=cuda,
        )


GPU = Gpu()


def play(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Play a GPU: CuPy, the compiler and what is remembered of calls are replaced."""
    global GPU
    GPU = Gpu()
    played = GPU
    monkeypatch.setitem(sys.modules, "cupy", played.cupy())
    monkeypatch.setattr(device, "of_id", lambda device_id: device.named("h200"))
    monkeypatch.setattr(arguments, "parse", played.parse)
    monkeypatch.setattr(jit, "kernel", played.kernel)
    monkeypatch.setattr(calls, "_ndarray", None)
    monkeypatch.setattr(calls, "_prepared", {})
    monkeypatch.setattr(calls, "_latest_calls", {})
    monkeypatch.setattr(append, "_prepared", {})
    monkeypatch.setattr(quantize, "_quantizers", {})
    monkeypatch.setattr(fp8, "_prepared", {})
    monkeypatch.setattr(fp8_calls.CALLS, "known", {})
    monkeypatch.setattr(gradient_calls.CALLS, "known", {})
    monkeypatch.setattr(backward, "_prepared", {})
    clear_rows._prepared.cache_clear()
    params.free_buffers.clear()
    monkeypatch.setattr(counters, "_of_device", {})
    monkeypatch.setattr(scratch, "_of_device", {})
    counters.low.clear()
    monkeypatch.setattr(counters, "filled", played.filled)
    monkeypatch.setattr(tensor_map, "_encode_tiled", lambda: played.driver.function)
    return played
