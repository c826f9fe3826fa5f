"""launch.py without a GPU: the layout of Params, and whole calls on a GPU that the host plays.

Its arrays look like CuPy's and lie in host memory. Its kernel finds them as a CUDA kernel does,
from the words of Params alone; it asserts what the CUDA kernels rely on, and computes with the
oracle.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, assert_accepted, oracle, random_inputs
from test_tensor_map import Driver, Encoded

import cufa
from cufa import device
from cufa.compiler import jit, source
from cufa.kernel import panel_columns
from cufa.launch import launch, tensor_map
from cufa.launch.launch import PARAMS
from cufa.planner.plan import Plan
from cufa.variant import Variant

ALIGNMENT = 16  # bytes: what the kernels copy at once

MAPS = np.dtype([(name, "u8", 16) for name in "qkvo"])
#: ``TmaArguments`` of tile_sm90.cuh: its maps make it a multiple of 64 bytes.
TMA_PARAMS = np.dtype(
    {
        "names": ["maps", "params"],
        "formats": [MAPS, PARAMS],
        "offsets": [0, MAPS.itemsize],
        "itemsize": -(-(MAPS.itemsize + PARAMS.itemsize) // 64) * 64,
    }
)


# --- the layout of Params ---


def fields_of(dtype: np.dtype, prefix: str = "", at: int = 0) -> list[tuple[str, int, np.dtype]]:
    """Name, offset and type of all numbers in a structure, those of its structures included."""
    found = []
    for name, (inner, offset, *_) in (dtype.fields or {}).items():
        if inner.fields:
            found += fields_of(inner, f"{prefix}{name}.", at + offset)
        else:
            found.append((prefix + name, at + offset, inner))
    return found


def assert_holds(cupy: Any, text: str, checks: list[str], arch: str) -> None:
    """Compile what is asserted of a text."""
    nvrtc = cupy.cuda.nvrtc
    if nvrtc.getVersion() < (13, 1):
        pytest.skip("this NVRTC has no __builtin_offsetof")
    asserted = "".join(f'static_assert({check}, "{check}");\n' for check in checks)
    program = nvrtc.createProgram(text + asserted, "layout.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-std=c++17", f"-arch={arch}"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def test_params_have_the_layout_of_the_header(cupy: Any) -> None:
    checks = [f"sizeof(Params) == {PARAMS.itemsize}"]
    for name, offset, dtype in fields_of(PARAMS):
        checks.append(f"__builtin_offsetof(Params, {name}) == {offset}")
        checks.append(f"sizeof(Params{{}}.{name}) == {dtype.itemsize}")
        if dtype.kind == "f":
            checks.append(f"static_cast<decltype(Params{{}}.{name})>(0.5) != 0")
        elif dtype.kind == "i":
            checks.append(f"static_cast<decltype(Params{{}}.{name})>(-1) < 0")
    header = (resources.files("cufa.kernels") / "params.cuh").read_text()
    assert_holds(cupy, header.replace("#pragma once", ""), checks, "sm_80")


def test_tma_params_have_the_layout_of_the_header(cupy: Any) -> None:
    """The hardware reads maps at multiples of 64 bytes."""
    checks = [
        f"sizeof(TmaArguments<Plain>) == {TMA_PARAMS.itemsize}",
        "alignof(TmaArguments<Plain>) == 64",
        f"__builtin_offsetof(TmaArguments<Plain>, params) == {TMA_PARAMS.fields['params'][1]}",  # type: ignore[index]
    ]
    for name, offset, dtype in fields_of(MAPS):
        checks.append(f"__builtin_offsetof(TmaArguments<Plain>, maps.{name}) == {offset}")
        checks.append(f"sizeof(TmaArguments<Plain>{{}}.maps.{name}) == {dtype.itemsize}")
    plain = "using Plain = Arguments<Score<>, Dense>;"
    checks.append("sizeof(Plain) == sizeof(Params)")  # a score without parameters takes no place
    assert_holds(cupy, f"{source.text('fa3_wgmma')}\n{plain}\n", checks, "sm_90a")


def test_params_have_no_gaps() -> None:
    """Else the header could hold a field that is not set."""
    end = 0
    for name, offset, dtype in fields_of(PARAMS):
        assert offset == end, name
        end += dtype.itemsize
    assert PARAMS.itemsize == -(-end // 8) * 8


# --- a GPU that the host plays ---


class _Array:
    """Stands for `cupy.ndarray`: new memory holds NaN, and begins at a multiple of 512 bytes."""

    def __init__(self, shape: Any, dtype: Any = np.float32, host: np.ndarray | None = None) -> None:
        self.device_id = GPU.current
        if host is None:
            dtype = np.dtype(dtype)
            nbytes = int(np.prod(shape)) * dtype.itemsize
            memory = np.full(nbytes + 512, 0xFF, np.uint8)
            start = -memory.ctypes.data % 512
            host = memory[start : start + nbytes].view(dtype).reshape(shape)
        self.host = host

    def __getattr__(self, name: str) -> Any:
        assert name in ("shape", "strides", "dtype", "ndim", "size", "itemsize", "flags"), name
        return getattr(self.host, name)

    @property
    def data(self) -> Any:
        """Address and device, as of `cupy.cuda.MemoryPointer`."""
        return SimpleNamespace(ptr=self.host.ctypes.data, device_id=self.device_id)

    def _view(self, host: np.ndarray) -> _Array:
        view = _Array(host.shape, host.dtype, host)
        view.device_id = self.device_id
        return view

    def __getitem__(self, key: Any) -> _Array:
        return self._view(self.host[key])

    def __setitem__(self, key: Any, value: _Array) -> None:
        self.host[key] = value.host

    def swapaxes(self, a: int, b: int) -> _Array:
        """View with two axes exchanged."""
        return self._view(self.host.swapaxes(a, b))

    def get(self) -> np.ndarray:
        """Host array of the values."""
        return self.host.copy()


def on_gpu(host: np.ndarray) -> _Array:
    """Copy of a host array in memory of its own."""
    array = _Array(host.shape, host.dtype)
    array.host[...] = host
    return array


class _Memory:
    """Elements somewhere in memory, for `numpy.asarray`."""

    def __init__(self, address: int, shape: Any, strides: Any, itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "data": (address, False),
        }


def elements(tensor: np.void, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Find the elements of a `Tensor` of Params; the last axis is contiguous."""
    size = dtype.itemsize
    strides = [int(tensor[f"stride_{axis}"]) * size for axis in ("batch", "head", "seq")]
    memory = _Memory(int(tensor["data"]), shape, (*strides, size), size)
    return np.asarray(memory).view(dtype)


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


def rows_of(map_words: np.ndarray, box: tuple[int, ...]) -> np.ndarray:
    """Find an array as TMA does, with the axes (batch, heads / pack, pack, seq, head_dim)."""
    said: Encoded = GPU.driver.described(map_words)
    assert said.box == box
    return np.moveaxis(said.array(said.address), 3, 2)


class _Kernel:
    """Stands for a compiled kernel."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    def __call__(self, grid: Any, block: Any, args: Any, smem_bytes: int) -> None:
        GPU.launches.append(self.variant)
        variant = self.variant
        (words,) = args
        if GPU.slow:
            time.sleep(0.002)  # another thread may run here
        assert block == (variant.threads,)
        assert smem_bytes == variant.smem_bytes
        if variant.kernel == "fa3_wgmma":
            self._run_with_tma(grid, words.view(TMA_PARAMS)[0])
        else:
            self._run(grid, words.view(PARAMS)[0])

    def _run(self, grid: Any, p: np.void) -> None:
        variant = self.variant
        batch, heads_q, heads_kv, d, dv = self._sizes(p)
        heads, seq_q, seq_kv = batch * heads_q, int(p["seq_q"]), int(p["seq_kv"])
        if variant.kernel == "fa1_fp32":
            assert grid == (heads,)
            workspace = _Memory(int(p["workspace"]), (2 * heads * seq_q,), (4,), 4)
            np.asarray(workspace).view(np.float32)[...] = 0
        else:
            assert grid == (heads * int(p["q_tiles"]),)
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

    def _run_with_tma(self, grid: Any, words: np.void) -> None:
        variant, maps, p = self.variant, words["maps"], words["params"]
        # To this kernel, heads whose rows are packed are one.
        pack, q_tiles = 1 << int(p["pack_log2"]), int(p["q_tiles"])
        batch, heads, heads_kv, d, dv = self._sizes(p)
        tiles = batch * heads * q_tiles
        assert grid == (min(tiles, device.of_id(GPU.current).sm_count * variant.blocks_per_sm),)
        assert q_tiles == -(-int(p["seq_q"]) * pack // variant.bm)
        assert p["workspace"] == 0
        GPU.counters.append(int(p["tiles_drawn"]))
        assert (p["tiles_drawn"] != 0) == (variant.causal and tiles > grid[0])
        if p["tiles_drawn"]:
            memory = _Memory(int(p["tiles_drawn"]), (1,), (4,), 4)
            assert np.asarray(memory).view(np.int32) == [0]

        columns, columns_v = panel_columns(variant.head_dim), panel_columns(variant.head_dim_v)
        q = rows_of(maps["q"], (columns, pack, variant.bm // pack, 1, 1))
        k = rows_of(maps["k"], (columns, 1, variant.bn, 1, 1))
        v = rows_of(maps["v"], (columns_v, 1, variant.bn, 1, 1))
        o = rows_of(maps["o"], (columns_v, pack, 64 // pack, 1, 1))
        assert q.shape == (batch, heads, pack, p["seq_q"], d)
        assert k.shape == (batch, heads_kv, 1, p["seq_kv"], d)
        assert v.shape == (batch, heads_kv, 1, p["seq_kv"], dv)
        out = self._computed(p, *(x.reshape(batch, -1, *x.shape[3:]) for x in (q, k, v)))
        o[...] = out.reshape(o.shape)
        # Where shared memory has no room for O, it is written without TMA, in aligned chunks.
        there = loaded(p["o"], out.shape, out.dtype, surplus=None)
        np.testing.assert_array_equal(there, out)

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
            memory = _Memory(int(p["lse"]), (lse.size,), (4,), 4)
            np.asarray(memory).view(np.float32)[...] = lse.ravel()
        return out.astype(DTYPES[self.variant.dtype])


class _Gpu:
    """What the played GPU is asked for, and which device is current."""

    current = 0
    slow = False

    def __init__(self) -> None:
        self.driver = Driver()
        self.stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
        self.counters: list[int] = []  # addresses, of launches with TMA
        self.launches: list[Variant] = []
        self.prepared: list[Variant] = []  # calls that were not known already

    def kernel(self, variant: Variant, _gpu: device.Device, device_id: int) -> _Kernel:
        """Stand for `jit.kernel`."""
        assert device_id == self.current
        self.prepared.append(variant)
        return _Kernel(variant)


GPU = _Gpu()


def zeros(shape: Any, dtype: Any) -> _Array:
    if GPU.slow:
        time.sleep(0.002)
    return on_gpu(np.zeros(shape, dtype))


def negative(array: _Array, out: _Array) -> None:
    np.negative(array.host, out=out.host)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    """Play a GPU: CuPy, the compiler and what is remembered of calls are replaced."""
    played = _Gpu()
    monkeypatch.setattr(sys.modules[__name__], "GPU", played)
    runtime = SimpleNamespace(getDevice=lambda: played.current)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: played.stream)
    cupy = SimpleNamespace(
        **{"__name__": "cupy", "ndarray": _Array, "empty": _Array, "zeros": zeros},
        **{"negative": negative, "cuda": cuda},
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    monkeypatch.setattr(device, "of_id", lambda device_id: device.named("h200"))
    monkeypatch.setattr(jit, "kernel", played.kernel)
    monkeypatch.setattr(launch, "_cupy", None)
    monkeypatch.setattr(launch, "_ndarray", None)
    monkeypatch.setattr(launch, "_ready", {})
    monkeypatch.setattr(launch, "_counters", {})
    monkeypatch.setattr(launch, "_COUNTERS", 1)
    monkeypatch.setattr(launch, "_zeros", lambda count: zeros(count, np.int32))
    monkeypatch.setattr(launch, "_captured", [])
    monkeypatch.setattr(tensor_map, "_driver", lambda: played.driver)
    return played


def one_in(host: np.ndarray) -> _Array:
    """Contiguous array that begins one element after an aligned address."""
    flat = on_gpu(np.append(host.ravel()[:1], host))
    return flat._view(flat.host[1:].reshape(host.shape))


ALL, NO_TMA, NONE = 2, 1, 0  # kernels

#: Arrays with the values of a host array, and which kernels take rows of 16-byte chunks as they
#: are: TMA takes no step back.
VIEWS: dict[str, tuple[Any, int]] = {
    "contiguous": (on_gpu, ALL),
    "heads inside": (lambda x: on_gpu(x.swapaxes(1, 2).copy()).swapaxes(1, 2), ALL),
    "reversed": (lambda x: on_gpu(x[:, ::-1, ::-1])[:, ::-1, ::-1], NO_TMA),
    "reversed batch": (lambda x: on_gpu(x[::-1])[::-1], NO_TMA),
    "every third row": (lambda x: on_gpu(np.repeat(x, 3, axis=2))[:, :, ::3], ALL),
    "transposed": (lambda x: on_gpu(x.swapaxes(2, 3).copy()).swapaxes(2, 3), NONE),
    "reversed dims": (lambda x: on_gpu(x[..., ::-1].copy())[..., ::-1], NONE),
    "every second element": (lambda x: on_gpu(np.repeat(x, 2, axis=3))[..., ::2], NONE),
    "one element in": (one_in, NONE),
    "odd rows": (lambda x: on_gpu(np.pad(x, ((0, 0),) * 3 + ((0, 1),)))[..., :-1], NONE),
}

dtypes = pytest.mark.parametrize("dtype", sorted(DTYPES))
kernels = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("fa1_fp32", "float32"),
        ("fa2_fp32", "float32"),
        ("fa2_mma", "float16"),
        ("fa3_wgmma", "float16"),
        ("fa3_wgmma", "bfloat16"),
    ],
)


@kernels
@pytest.mark.parametrize("view", sorted(VIEWS))
@pytest.mark.parametrize("d", [64, 59, 1])
def test_strides(
    gpu: _Gpu, rng: np.random.Generator, view: str, d: int, kernel: str, dtype: str
) -> None:
    make, taken_by = VIEWS[view]
    direct = taken_by == ALL or (taken_by == NO_TMA and kernel != "fa3_wgmma")
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=7, sk=9, d=d)
    arrays = [make(x) for x in (q, k, v)]
    for scale in (None, -0.4):
        for repeat in range(3):
            prepared = len(gpu.prepared)
            options: dict[str, Any] = {"causal": True, "scale": scale}
            given = make(np.full(q.shape, np.nan, q.dtype)) if repeat == 2 else None
            out, lse = cufa.attention(*arrays, **options, out=given, kernel=kernel, return_lse=True)
            assert given is None or out is given
            assert_accepted(out, lse, q, k, v, **options)
            for array, host in zip(arrays, (q, k, v), strict=True):
                np.testing.assert_array_equal(array.get(), host)
            if repeat == 1:  # what needs no copy is not prepared again
                known = direct and d == 64 and scale is None
                assert len(gpu.prepared) == prepared + (not known)


@kernels
def test_layouts_and_ranks(gpu: _Gpu, rng: np.random.Generator, dtype: str, kernel: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=6, hk=3, sq=7, sk=9, d=64, dv=32)
    for _ in range(2):
        for causal in (False, True):
            options: dict[str, Any] = {"causal": causal, "return_lse": True, "kernel": kernel}
            out, lse = cufa.attention(*map(on_gpu, (q, k, v)), **options)
            assert_accepted(out, lse, q, k, v, causal=causal)
            swapped = [on_gpu(x.swapaxes(1, 2).copy()) for x in (q, k, v)]
            out, lse = cufa.attention(*swapped, layout="bshd", **options)
            assert out.shape == (2, 7, 6, 32)
            assert_accepted(out.swapaxes(1, 2), lse, q, k, v, causal=causal)
            one_head = [x[:, :1] for x in (q, k, v)]
            out, lse = cufa.attention(*(on_gpu(x[:, 0]) for x in one_head), **options)
            assert out.shape == (2, 7, 32)
            assert_accepted(out[:, None], lse[:, None], *one_head, causal=causal)
            one = [x[:1] for x in one_head]
            out, lse = cufa.attention(*(on_gpu(x[0, 0]) for x in one), **options)
            assert out.shape == (7, 32)
            assert_accepted(out[None, None], lse[None, None], *one, causal=causal)
            assert isinstance(cufa.attention(*map(on_gpu, (q, k, v)), causal=causal), _Array)


@kernels
def test_broadcast_inputs(gpu: _Gpu, rng: np.random.Generator, kernel: str, dtype: str) -> None:
    """They are not copied, but for TMA, which cannot stay in its place."""
    q, k, v = random_inputs(rng, dtype, b=3, hq=4, sq=7, sk=9, d=64)
    k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (k, v))
    one = [on_gpu(x[:1, :1]) for x in (k, v)]
    arrays = [on_gpu(q), *(x._view(np.broadcast_to(x.host, k.shape)) for x in one)]
    for _ in range(2):
        assert_accepted(cufa.attention(*arrays, kernel=kernel), None, q, k, v)
    assert len(gpu.prepared) == (2 if kernel == "fa3_wgmma" else 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("hq", "hk", "sq", "packed"),
    [(8, 1, 1, True), (16, 4, 5, True), (64, 1, 2, True), (6, 2, 5, False), (8, 2, 300, False)],
)
def test_heads_of_a_group_in_one_tile(
    gpu: _Gpu,
    rng: np.random.Generator,
    hq: int,
    hk: int,
    sq: int,
    packed: bool,
    causal: bool,
) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=hq, hk=hk, sq=sq, sk=7, d=32, dv=16)
    chosen = cufa.explain(*map(on_gpu, (q, k, v)), causal=causal)
    assert isinstance(chosen, Plan)
    assert chosen.pack == (hq // hk if packed else 1)
    for layout in ("bhsd", "bshd", "bhsd", "bshd"):
        given = [x if layout == "bhsd" else x.swapaxes(1, 2).copy() for x in (q, k, v)]
        options: dict[str, Any] = {"causal": causal, "layout": layout, "return_lse": True}
        out, lse = cufa.attention(*map(on_gpu, given), **options)
        if layout == "bshd":
            out = out.swapaxes(1, 2)
        assert_accepted(out, lse, q, k, v, causal=causal)
    assert len(gpu.prepared) == 2


@pytest.mark.parametrize(
    ("bm", "bn", "head_dims"),
    [
        *((64, 48, dims) for dims in ((64, 64), (96, 160), (256, 256), (80, 48))),
        *((128, 64, dims) for dims in ((64, 64), (96, 160), (256, 256), (80, 48))),
        *((192, 128, dims) for dims in ((64, 64), (96, 160), (80, 48))),
        *((256, 128, dims) for dims in ((64, 64), (80, 48))),
    ],
)
def test_tiles_of_any_size(
    gpu: _Gpu, rng: np.random.Generator, bm: int, bn: int, head_dims: tuple[int, int]
) -> None:
    """Their boxes are what a tile in shared memory holds, with heads packed or not."""
    for group, sq in ((1, 300), (4, 50), (4, 300)):
        d, dv = head_dims
        sizes = {"b": 2, "hq": 2 * group, "hk": 2, "sq": sq, "sk": 70}
        q, k, v = random_inputs(rng, "float16", **sizes, d=d, dv=dv)
        stages = 2 if bm == 256 else 1
        variant = Variant(
            "fa3_wgmma", "float16", d, dv, bm, bn, stages, bm // 16 + 4, 1, score=("Causal",)
        )
        out, lse = cufa.attention(
            *map(on_gpu, (q, k, v)), causal=True, kernel=variant, return_lse=True
        )
        assert gpu.launches[-1] == variant
        assert_accepted(out, lse, q, k, v, causal=True)


@pytest.mark.parametrize(
    ("b", "hq", "hk", "sq"), [(0, 4, 2, 5), (2, 4, 2, 0), (2, 0, 2, 5), (2, 0, 0, 5)]
)
def test_empty_results_launch_nothing(
    gpu: _Gpu, rng: np.random.Generator, b: int, hq: int, hk: int, sq: int
) -> None:
    q, k, v = map(on_gpu, random_inputs(rng, "float16", b=b, hq=hq, hk=hk, sq=sq, sk=3, d=8))
    for _ in range(2):
        out, lse = cufa.attention(q, k, v, return_lse=True)
        assert out.shape == (b, hq, sq, 8)
        assert lse.shape == (b, hq, sq)
    assert gpu.launches == []


@dtypes
def test_no_keys(gpu: _Gpu, rng: np.random.Generator, dtype: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, sq=5, sk=0, d=64, dv=24)
    for _ in range(2):
        out, lse = cufa.attention(*map(on_gpu, (q, k, v)), return_lse=True)
        assert_accepted(out, lse, q, k, v)


@pytest.mark.parametrize("scale", [0, -0.0, 1e-40, 5, -5])
def test_scale(gpu: _Gpu, rng: np.random.Generator, scale: float) -> None:
    q, k, v = random_inputs(rng, "float32", hq=2, sq=5, sk=9, d=64)
    for _ in range(2):
        out, lse = cufa.attention(*map(on_gpu, (q, k, v)), scale=scale, return_lse=True)
        assert_accepted(out, lse, q, k, v, scale=scale)


# --- what is remembered of a call must not be used for another one ---


def legal(rng: np.random.Generator, dtype: str = "float16", **sizes: int) -> dict[str, Any]:
    shape = {"b": 2, "hq": 4, "sq": 8, "d": 64, **sizes}
    return dict(zip("qkv", map(on_gpu, random_inputs(rng, dtype, **shape)), strict=True))


def checked(call: dict[str, Any], **options: Any) -> Any:
    """Make a call, and compare the result with the oracle's."""
    out = cufa.attention(**call, **options)
    inputs = (call[name].get() for name in "qkv")
    assert_accepted(out, None, *inputs, causal=options.get("causal", False))
    return out


def test_another_dtype_shape_or_option(gpu: _Gpu, rng: np.random.Generator) -> None:
    calls = [
        legal(rng),
        legal(rng, "bfloat16"),
        legal(rng, "float32"),
        legal(rng, sq=9),
        legal(rng, b=1),
        legal(rng, hq=2),
        legal(rng, d=72),
        {**legal(rng), "k": legal(rng, sq=5)["k"], "v": legal(rng, sq=5)["v"]},
        {**legal(rng), "v": legal(rng, d=32)["v"]},
    ]
    kinds = [(call, causal) for call in calls for causal in (False, True)]
    for _ in range(2):
        for call, causal in kinds:
            checked(call, causal=causal)
    assert len(gpu.prepared) == len(kinds)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_another_alignment(gpu: _Gpu, rng: np.random.Generator, name: str) -> None:
    call = legal(rng)
    checked(call)
    checked({**call, name: one_in(call[name].host)})
    assert len(gpu.prepared) == 2


@pytest.mark.parametrize(("kernel", "prepared"), [("fa2_mma", 1), ("fa3_wgmma", 3)])
def test_out_of_any_alignment(
    gpu: _Gpu, rng: np.random.Generator, kernel: str, prepared: int
) -> None:
    """TMA writes aligned rows, from which others are copied; nothing is remembered of that."""
    call = legal(rng)
    for make in (on_gpu, one_in, on_gpu):
        for _ in range(2):
            out = make(np.full((2, 4, 8, 64), np.nan, np.float16))
            assert checked({**call, "out": out}, kernel=kernel) is out
    assert len(gpu.prepared) == prepared


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_elements_that_are_not_aligned(gpu: _Gpu, rng: np.random.Generator, name: str) -> None:
    call = {**legal(rng), "out": on_gpu(np.full((2, 4, 8, 64), np.nan, np.float16))}
    array = call[name]
    memory = np.zeros(array.host.nbytes + 1, np.uint8)
    odd = array._view(memory[1:].view(np.float16).reshape(array.shape))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name} .* no multiple of 2 bytes"):
            cufa.attention(**{**call, name: odd})
        checked(call)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_that_overlaps(gpu: _Gpu, rng: np.random.Generator, name: str) -> None:
    call = legal(rng)
    for _ in range(2):
        checked({**call, "out": on_gpu(np.full((2, 4, 8, 64), np.nan, np.float16))})
        with pytest.raises(ValueError, match=f"^out .* shares memory with {name}"):
            cufa.attention(**call, out=call[name])


def test_out_between_the_inputs(gpu: _Gpu, rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float16", b=2, hq=3, sq=7, d=64)
    for _ in range(2):
        slots = [x.swapaxes(1, 2) for x in (q, k, v, np.full_like(q, np.nan))]
        packed = on_gpu(np.stack(slots, axis=2))
        views = [packed[:, :, i] for i in range(4)]
        assert cufa.attention(*views[:3], out=views[3], layout="bshd") is views[3]
        assert_accepted(views[3].swapaxes(1, 2), None, q, k, v)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_another_device(gpu: _Gpu, rng: np.random.Generator, name: str) -> None:
    call = {**legal(rng), "out": on_gpu(np.full((2, 4, 8, 64), np.nan, np.float16))}
    gpu.current = 1
    there = {n: on_gpu(x.host) for n, x in call.items()}
    for _ in range(2):
        gpu.current = 0
        checked(call)
        with pytest.raises(ValueError, match=f"^{name} .* is on device 1, but .* device is 0"):
            cufa.attention(**{**call, name: there[name]})
        gpu.current = 1
        assert checked(there).device_id == 1
        with pytest.raises(ValueError, match=r"^q .* is on device 0, but .* device is 1"):
            cufa.attention(**call)
    assert len(gpu.prepared) == 2


#: Options that equal legal ones, or cannot be hashed, after a legal call.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "causal": ({"causal": True}, {"causal": 1}, TypeError, "causal"),
    "causal list": ({}, {"causal": [True]}, TypeError, "causal"),
    "scale": ({"scale": 1.0}, {"scale": True}, TypeError, "scale"),
    "scale array": ({"scale": 1.0}, {"scale": np.ones(1)}, TypeError, "scale"),
    "layout": ({}, {"layout": ["bhsd"]}, TypeError, "layout"),
    "kernel": ({"kernel": "fa2_mma"}, {"kernel": ["fa2_mma"]}, TypeError, "kernel"),
    "return_lse": ({"return_lse": True}, {"return_lse": [True]}, TypeError, "return_lse"),
    "return_lse array": ({}, {"return_lse": np.ones(2)}, TypeError, "return_lse"),
}


@pytest.mark.parametrize("case", sorted(OPTIONS))
def test_options_that_look_like_known_ones(gpu: _Gpu, rng: np.random.Generator, case: str) -> None:
    known, illegal, error, name = OPTIONS[case]
    call = legal(rng)
    for options in ({}, known):
        cufa.attention(**call, **options)
    launches = len(gpu.launches)
    with pytest.raises(error, match=rf"^{name}\b"):
        cufa.attention(**call, **illegal)
    assert len(gpu.launches) == launches, "it was launched before the error"


def variant_of(call: dict[str, Any]) -> Variant:
    chosen = cufa.explain(**call)
    assert isinstance(chosen, Plan)
    return chosen.variant


def test_a_tuple_is_no_variant(gpu: _Gpu, rng: np.random.Generator) -> None:
    call = legal(rng)
    variant = variant_of(call)
    cufa.attention(**call, kernel=variant)
    assert gpu.launches[-1] == variant
    with pytest.raises(TypeError, match=r"^kernel must be a str or a Variant, not tuple"):
        cufa.attention(**call, kernel=tuple(variant))  # type: ignore[arg-type]


def test_what_is_remembered_is_bounded(
    gpu: _Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_CACHE_SIZE", 3)
    for length in (*range(1, 9), *range(8, 0, -1)):
        checked(legal(rng, sq=length))
        assert len(launch._ready) <= 3


def in_threads(count: int, work: Any) -> None:
    """Call `work` in so many threads at once, each with its number."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_threads_share_what_is_remembered(gpu: _Gpu, rng: np.random.Generator) -> None:
    """Each launch must find its own addresses in the one Params of its kind."""
    calls = [legal(rng) for _ in range(6)]
    checked(calls[0])
    gpu.slow = True

    def work(number: int) -> None:
        for _ in range(5):
            checked(calls[number])

    in_threads(len(calls), work)
    assert len(gpu.prepared) == 1


def test_explain_launches_nothing(gpu: _Gpu, rng: np.random.Generator) -> None:
    call = legal(rng)
    variant = variant_of(call)
    assert variant.kernel == "fa3_wgmma"
    assert gpu.prepared == []
    assert gpu.driver.encoded == []
    cufa.attention(**call)
    assert gpu.launches == [variant]


# --- the counter from which blocks draw their tiles ---


@pytest.fixture
def small(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    """Play a GPU with one multiprocessor, so that few tiles are more than blocks."""
    one = device.named("h200")._replace(sm_count=1)
    monkeypatch.setattr(device, "of_id", lambda device_id: one)
    return gpu


def stream(ptr: int, capturing: bool = False) -> Any:
    return SimpleNamespace(ptr=ptr, is_capturing=lambda: capturing)


def drawn(gpu: _Gpu, call: dict[str, Any], causal: bool = True) -> int:
    """Return the address of the counter in a launch."""
    checked(call, causal=causal)
    return gpu.counters[-1]


def test_only_tiles_that_wait_for_a_block_are_drawn(small: _Gpu, rng: np.random.Generator) -> None:
    for _ in range(2):
        assert drawn(small, legal(rng), causal=True)
        assert drawn(small, legal(rng, sq=300), causal=True)
        assert not drawn(small, legal(rng), causal=False)
        assert not drawn(small, legal(rng, b=1, hq=2), causal=True)


def test_launches_of_a_stream_share_a_counter(small: _Gpu, rng: np.random.Generator) -> None:
    """Whatever they compute: they follow each other."""
    calls = [legal(rng), legal(rng, "bfloat16"), legal(rng, sq=300), legal(rng)]
    found: dict[int, set[int]] = {}
    for ptr in (0, 1, 7, 0, 1, 7):
        small.stream = stream(ptr)
        found.setdefault(ptr, set()).update(drawn(small, call) for call in calls)
    assert all(len(addresses) == 1 for addresses in found.values())
    assert len(set.union(*found.values())) == 3


def test_a_counter_is_used_again_after_many_launches(
    small: _Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a stream that is gone may still run when another has come to have its name."""
    monkeypatch.setattr(launch, "_COUNTERS", 3)
    calls = [legal(rng), legal(rng, sq=300)]
    found = [drawn(small, calls[n % 2]) for n in range(7)]
    assert len(set(found[:3])) == 3
    assert found[3:] == found[:4]
    small.stream = stream(7)
    assert drawn(small, calls[0]) not in found


def test_each_device_has_its_counters(small: _Gpu, rng: np.random.Generator) -> None:
    host = legal(rng)
    found = []
    for current in (0, 1, 0, 1):
        small.current = current
        found.append(drawn(small, {name: on_gpu(x.host) for name, x in host.items()}))
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_captured_launches_have_their_own_counters(small: _Gpu, rng: np.random.Generator) -> None:
    """A graph may run beside the stream that it was captured on; the counters live on with us."""
    call = legal(rng)
    usual = drawn(small, call)
    small.stream = stream(0, capturing=True)
    captured = [drawn(small, call) for _ in range(3)]
    assert len({usual, *captured}) == 4
    assert {x.data.ptr for x in launch._captured} == set(captured)
    small.stream = stream(0)
    assert drawn(small, call) == usual


@pytest.mark.parametrize(("ptr", "counters"), [(2, 4), (1, 1), (0, 1)])
def test_threads_have_counters_as_they_have_streams(
    small: _Gpu, rng: np.random.Generator, ptr: int, counters: int
) -> None:
    """cudaStreamPerThread, which is 2, is another stream in each; others are the same in all.

    Also when the first launches of a stream come at once, each of another problem.
    """
    calls = [legal(rng, sq=8 + n) for n in range(4)]
    for call in calls:
        checked(call, causal=True)
    small.counters.clear()
    small.stream = stream(ptr)
    launch._counters.clear()
    small.slow = True

    def work(number: int) -> None:
        for _ in range(3):
            checked(calls[number], causal=True)

    in_threads(4, work)
    assert len(small.counters) == 12
    assert len(set(small.counters)) == counters
