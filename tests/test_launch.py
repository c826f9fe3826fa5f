"""launch/ without a GPU: whole calls on a GPU that the host plays."""

from __future__ import annotations

import ctypes
import inspect
import random
import sys
import threading
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
from played_gpu import Array, Gpu, Stream, on_gpu, one_in
from reference import DTYPES, assert_accepted, random_inputs

import cufa
from cufa import device
from cufa.api.options import Layout
from cufa.compiler import jit
from cufa.features.causal import Causal
from cufa.features.window import Window
from cufa.launch import calls, counters, loaded, prepare, scratch
from cufa.planner.decode import DecodePlan
from cufa.planner.plan import Plan
from cufa.planner.rules import KEY_STEP
from cufa.problem.extras import NO_EXTRAS
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

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
    gpu: Gpu, rng: np.random.Generator, view: str, d: int, kernel: str, dtype: str
) -> None:
    make, taken_by = VIEWS[view]
    direct = taken_by == ALL or (taken_by == NO_TMA and kernel != "fa3_wgmma")
    direct = direct and d * DTYPES[dtype].itemsize % 16 == 0
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=7, sk=9, d=d)
    arrays = [make(x) for x in (q, k, v)]
    for scale in (None, -0.4):
        for repeat in range(3):
            parsed, encoded = gpu.parsed, len(gpu.driver.encoded)
            options: dict[str, Any] = {"causal": True, "scale": scale}
            given = make(np.full(q.shape, np.nan, q.dtype)) if repeat == 2 else None
            gpu.allocated.clear()
            out, lse = cufa.attention(*arrays, **options, out=given, kernel=kernel, return_lse=True)
            copies = sum(len(shape) == 4 for shape in gpu.allocated) - (given is None)
            assert given is None or out is given
            assert_accepted(out, lse, q, k, v, **options)
            for array, host in zip(arrays, (q, k, v), strict=True):
                np.testing.assert_array_equal(array.get(), host)
            if direct:
                assert copies == (scale is not None), "a copy was made"
            if repeat == 1:  # calls that copy are remembered, too
                assert gpu.parsed == parsed
                assert len(gpu.driver.encoded) == encoded


@kernels
def test_layouts_and_ranks(gpu: Gpu, rng: np.random.Generator, dtype: str, kernel: str) -> None:
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
            assert isinstance(cufa.attention(*map(on_gpu, (q, k, v)), causal=causal), Array)


def broadcast(array: Array, shape: tuple[int, ...]) -> Array:
    """View with a stride of 0 along some axes."""
    return array.view_of(np.broadcast_to(array.host, shape))


@kernels
@pytest.mark.parametrize("shared", ["batch", "heads", "batch and heads"])
def test_broadcast_keys_and_values_are_read_in_place(
    gpu: Gpu, rng: np.random.Generator, shared: str, kernel: str, dtype: str
) -> None:
    q, k, v = random_inputs(rng, dtype, b=3, hq=4, hk=2, sq=7, sk=9, d=64, dv=32)
    one = (slice(1 if "batch" in shared else None), slice(1 if "heads" in shared else None))
    arrays = [on_gpu(q), *(broadcast(on_gpu(x[one]), x.shape) for x in (k, v))]
    hosts = [x.get() for x in arrays]
    for _ in range(2):
        for causal in (False, True):
            gpu.allocated.clear()
            out, lse = cufa.attention(*arrays, causal=causal, kernel=kernel, return_lse=True)
            assert_accepted(out, lse, *hosts, causal=causal)
            assert (3, 2, 9, 64) not in gpu.allocated
            assert (3, 2, 9, 32) not in gpu.allocated
        out = on_gpu(np.full(out.shape, np.nan, q.dtype))
        assert cufa.attention(*arrays, out=out, kernel=kernel) is out
        assert_accepted(out, None, *hosts)


def test_out_beside_and_over_broadcast_keys(gpu: Gpu, rng: np.random.Generator) -> None:
    """A broadcast array has only one copy to overlap."""
    memory = on_gpu(np.zeros((3, 1, 8, 64), np.float16))
    q = on_gpu(random_inputs(rng, "float16", b=3, hq=1, sq=8, d=64)[0])
    k = broadcast(memory[:1], (3, 1, 8, 64))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out .* shares memory with k"):
            cufa.attention(q, k, k, out=memory)
        checked({"q": q[:2], "k": k[:2], "v": k[:2], "out": memory[1:]})


@kernels
def test_other_broadcast_inputs(
    gpu: Gpu, rng: np.random.Generator, kernel: str, dtype: str
) -> None:
    """TMA cannot stay at a key, or at a query's batch."""
    q, k, v = random_inputs(rng, dtype, b=3, hq=4, sq=7, sk=9, d=64)
    given = [(q[:1], q.shape), (k[:, :, :1], k.shape), (v[:, :, :1], v.shape)]
    arrays = [broadcast(on_gpu(x), shape) for x, shape in given]
    hosts = [x.get() for x in arrays]
    for _ in range(2):
        gpu.allocated.clear()
        assert_accepted(cufa.attention(*arrays, kernel=kernel), None, *hosts)
        copies = sum(len(shape) == 4 for shape in gpu.allocated) - 1
        assert copies == (3 if kernel == "fa3_wgmma" else 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("hq", "hk", "sq", "packed"),
    [(8, 1, 1, True), (16, 4, 5, True), (64, 1, 2, True), (6, 2, 5, False), (8, 2, 300, False)],
)
def test_heads_of_a_group_in_one_tile(
    gpu: Gpu,
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
    gpu.parsed = 0
    for layout in ("bhsd", "bshd", "bhsd", "bshd"):
        given = [x if layout == "bhsd" else x.swapaxes(1, 2).copy() for x in (q, k, v)]
        options: dict[str, Any] = {"causal": causal, "layout": layout, "return_lse": True}
        out, lse = cufa.attention(*map(on_gpu, given), **options)
        if layout == "bshd":
            out = out.swapaxes(1, 2)
        assert_accepted(out, lse, q, k, v, causal=causal)
    assert gpu.parsed == 2


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
    gpu: Gpu, rng: np.random.Generator, bm: int, bn: int, head_dims: tuple[int, int]
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
    gpu: Gpu, rng: np.random.Generator, b: int, hq: int, hk: int, sq: int
) -> None:
    q, k, v = map(on_gpu, random_inputs(rng, "float16", b=b, hq=hq, hk=hk, sq=sq, sk=3, d=8))
    for _ in range(2):
        out, lse = cufa.attention(q, k, v, return_lse=True)
        assert out.shape == (b, hq, sq, 8)
        assert lse.shape == (b, hq, sq)
    assert gpu.launches == []


@dtypes
def test_no_keys(gpu: Gpu, rng: np.random.Generator, dtype: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, sq=5, sk=0, d=64, dv=24)
    for _ in range(2):
        out, lse = cufa.attention(*map(on_gpu, (q, k, v)), return_lse=True)
        assert_accepted(out, lse, q, k, v)


@pytest.mark.parametrize("scale", [0, -0.0, 1e-40, 5, -5])
def test_scale(gpu: Gpu, rng: np.random.Generator, scale: float) -> None:
    q, k, v = random_inputs(rng, "float32", hq=2, sq=5, sk=9, d=64)
    for _ in range(2):
        out, lse = cufa.attention(*map(on_gpu, (q, k, v)), scale=scale, return_lse=True)
        assert_accepted(out, lse, q, k, v, scale=scale)


# --- what is remembered of a call must not be used for another one ---


def legal(rng: np.random.Generator, dtype: str = "float16", **sizes: Any) -> dict[str, Any]:
    shape = {"b": 2, "hq": 4, "sq": 8, "d": 64, **sizes}
    return dict(zip("qkv", map(on_gpu, random_inputs(rng, dtype, **shape)), strict=True))


def checked(call: dict[str, Any], **options: Any) -> Any:
    """Make a call, and compare the result with the oracle's."""
    out = cufa.attention(**call, **options)
    inputs = (call[name].get() for name in "qkv")
    assert_accepted(out, None, *inputs, causal=options.get("causal", False))
    return out


def test_another_dtype_shape_or_option(gpu: Gpu, rng: np.random.Generator) -> None:
    inputs = [
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
    kinds = [(call, causal) for call in inputs for causal in (False, True)]
    for _ in range(2):
        for call, causal in kinds:
            checked(call, causal=causal)
    assert gpu.parsed == 2 * 5  # three dtypes, and two other head dims


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_another_alignment(gpu: Gpu, rng: np.random.Generator, name: str) -> None:
    call = legal(rng)
    checked(call)
    for _ in range(2):
        checked({**call, name: one_in(call[name].host)})
    assert gpu.parsed == 1


@pytest.mark.parametrize("kernel", ["fa2_mma", "fa3_wgmma"])
def test_out_of_any_alignment(gpu: Gpu, rng: np.random.Generator, kernel: str) -> None:
    """TMA writes aligned rows, from which others are copied."""
    call = legal(rng)
    for make in (on_gpu, one_in, on_gpu):
        for _ in range(2):
            out = make(np.full((2, 4, 8, 64), np.nan, np.float16))
            gpu.allocated.clear()
            assert checked({**call, "out": out}, kernel=kernel) is out
            assert len(gpu.allocated) == (make is one_in and kernel == "fa3_wgmma")
    assert gpu.parsed == 1


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_elements_that_are_not_aligned(gpu: Gpu, rng: np.random.Generator, name: str) -> None:
    call = {**legal(rng), "out": on_gpu(np.full((2, 4, 8, 64), np.nan, np.float16))}
    array = call[name]
    memory = np.zeros(array.host.nbytes + 1, np.uint8)
    odd = array.view_of(memory[1:].view(np.float16).reshape(array.shape))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name} .* no multiple of 2 bytes"):
            cufa.attention(**{**call, name: odd})
        checked(call)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_that_overlaps(gpu: Gpu, rng: np.random.Generator, name: str) -> None:
    call = legal(rng)
    for _ in range(2):
        checked({**call, "out": on_gpu(np.full((2, 4, 8, 64), np.nan, np.float16))})
        with pytest.raises(ValueError, match=f"^out .* shares memory with {name}"):
            cufa.attention(**call, out=call[name])


def test_out_between_the_inputs(gpu: Gpu, rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float16", b=2, hq=3, sq=7, d=64)
    for _ in range(2):
        slots = [x.swapaxes(1, 2) for x in (q, k, v, np.full_like(q, np.nan))]
        packed = on_gpu(np.stack(slots, axis=2))
        views = [packed[:, :, i] for i in range(4)]
        assert cufa.attention(*views[:3], out=views[3], layout="bshd") is views[3]
        assert_accepted(views[3].swapaxes(1, 2), None, q, k, v)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_another_device(gpu: Gpu, rng: np.random.Generator, name: str) -> None:
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
    assert len(gpu.loaded) == 2


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
def test_options_that_look_like_known_ones(gpu: Gpu, rng: np.random.Generator, case: str) -> None:
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


def test_a_tuple_is_no_variant(gpu: Gpu, rng: np.random.Generator) -> None:
    call = legal(rng)
    variant = variant_of(call)
    cufa.attention(**call, kernel=variant)
    assert gpu.launches[-1] == variant
    with pytest.raises(TypeError, match=r"^kernel must be a str or a Variant, not tuple"):
        cufa.attention(**call, kernel=tuple(variant))  # type: ignore[call-overload]


@pytest.mark.parametrize("known", [False, True])
def test_a_variant_that_looks_like_a_known_one(
    gpu: Gpu, rng: np.random.Generator, known: bool
) -> None:
    call = legal(rng)
    variant = variant_of(call)
    if known:
        cufa.attention(**call, kernel=variant)
    odd = variant._replace(bm=float(variant.bm))  # type: ignore[arg-type]
    assert odd == variant
    with pytest.raises(ValueError, match=r"^kernel: .* must be positive integers"):
        cufa.attention(**call, kernel=odd)
    assert len(gpu.launches) == known


def prepares(rng: np.random.Generator, *lengths: int) -> int:
    """Make calls, and return how many of them had to be prepared."""
    of_kind = prepare.PreparedCalls.prepare
    with mock.patch.object(prepare.PreparedCalls, "prepare", autospec=True) as prepared:
        prepared.side_effect = of_kind
        for length in lengths:
            checked(legal(rng, sq=length))
    return prepared.call_count


@pytest.mark.usefixtures("gpu")
def test_what_comes_again_is_remembered(rng: np.random.Generator) -> None:
    """At once if it is the next, and for long from the second time on."""
    assert prepares(rng, 1) == 1
    assert prepares(rng, 1, 1) == 0
    assert prepares(rng, 2, 1, 2) == 3
    assert prepares(rng, 1, 2, 3, 1, 2, 1, 2) == 1


def test_tensor_maps_are_remembered(
    gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays of an earlier shape, with others or not, have maps; of too many the oldest go."""
    monkeypatch.setattr(loaded, "_MAPS", 8)
    for sq, sk, maps in ((5, 7, 2), (6, 7, 1), (5, 8, 1), (6, 8, 0), (6, 6, 1), (8, 7, 1)):
        encoded = len(gpu.driver.encoded)
        checked(legal(rng, sq=sq, sk=sk))
        assert len(gpu.driver.encoded) == encoded + maps
    for sq in range(20, 40):
        checked(legal(rng, sq=sq))
    ((known, *_),) = (kind._loaded.values() for kind in calls._prepared.values())
    assert len(known._maps) == 8
    encoded = len(gpu.driver.encoded)
    checked(legal(rng, sq=5, sk=7))
    assert len(gpu.driver.encoded) == encoded + 2


def parameter_of(launch: Any) -> Any:
    """Return the parameter of a prepared launch."""
    return inspect.getclosurevars(launch).nonlocals["content"]


@pytest.mark.usefixtures("gpu")
@dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_plain_arrays_are_prepared_like_others(
    rng: np.random.Generator, dtype: str, causal: bool
) -> None:
    for sq, sk in ((1, 700), (1, 7), (130, 130), (600, 300)):
        call = legal(rng, dtype=dtype, sq=sq, sk=sk)
        cufa.attention(**call, causal=causal)
        (kind,) = calls._prepared.values()
        ((key, *_),) = calls._latest_calls.values()
        address = call["q"].data.ptr
        plain = kind._plain(key, address)
        other = kind._prepared(key, address, kind._planner)
        assert plain is not None
        assert other is not None
        assert parameter_of(plain.launch) == parameter_of(other.launch)
        assert plain[1:] == other[1:]


def test_what_is_remembered_is_bounded(
    gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest goes, and no more."""
    monkeypatch.setattr(calls, "_KINDS", 2)
    monkeypatch.setattr(prepare, "_CALLS", 3)
    monkeypatch.setattr(prepare, "_SEEN", 5)
    for length in (1, 2, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, *range(8, 0, -1)):
        for causal in (False, True):
            checked(legal(rng, sq=length), causal=causal)
            assert 1 <= len(calls._prepared) <= 2
            assert all(len(each.calls) <= 3 for each in calls._prepared.values())
            assert all(1 <= len(each._seen) <= 5 for each in calls._prepared.values())
    assert gpu.parsed == 2
    monkeypatch.setattr(prepare, "_SEEN", 50)
    for each in calls._prepared.values():
        each.calls.clear()
    prepares(rng, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4)
    assert prepares(rng, 2, 3, 4) == 0
    assert prepares(rng, 1) == 1
    checked(legal(rng), kernel="fa2_mma")
    checked(legal(rng, sq=1), causal=True)  # not the oldest
    assert gpu.parsed == 3


def in_threads(count: int, work: Any) -> None:
    """Call `work` in several threads at once, each with its number."""
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


def test_threads_share_what_is_remembered(gpu: Gpu, rng: np.random.Generator) -> None:
    """Each launch must find its own addresses in the one Params of its kind."""
    inputs = [legal(rng) for _ in range(6)]
    checked(inputs[0])
    gpu.slow = True

    def work(number: int) -> None:
        for _ in range(5):
            checked(inputs[number])

    in_threads(len(inputs), work)
    assert len(gpu.loaded) == 1


def test_threads_that_take_turns_at_every_line(gpu: Gpu, rng: np.random.Generator) -> None:
    """The memory of the latest call may be another thread's a moment later."""
    queries = on_gpu(rng.standard_normal((1, 16, 1, 64)).astype(np.float16))
    cache = on_gpu(rng.standard_normal((1, 8, 600, 64)).astype(np.float16))

    def stop(frame: Any, event: str, argument: Any) -> Any:
        time.sleep(0)
        return stop

    def work(number: int) -> None:
        sys.settrace(lambda frame, event, argument: stop if "prepare.py" in str(frame) else None)
        heads = 8 + number % 2 * 8
        for keys in range(20 + number, 270 + number):
            k = cache[:, :, :keys]
            assert cufa.attention(queries[:, :heads], k, k).shape == (1, heads, 1, 64)

    in_threads(4, work)


def test_explain_launches_nothing(gpu: Gpu, rng: np.random.Generator) -> None:
    call = legal(rng)
    variant = variant_of(call)
    assert variant.kernel == "fa3_wgmma"
    assert gpu.loaded == []
    assert gpu.driver.encoded == []
    cufa.attention(**call)
    assert gpu.launches == [variant]


# --- lengths that are new ---


def lengths(rng: np.random.Generator) -> dict[str, int]:
    """Draw sizes."""
    heads_kv = int(rng.integers(1, 4))
    return {
        **{"b": int(rng.integers(1, 4)), "hq": heads_kv * int(rng.integers(1, 4)), "hk": heads_kv},
        **{"sq": int(rng.integers(1, 90)), "sk": int(rng.integers(1, 90))},
    }


@kernels
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("d", [64, 59])
def test_new_lengths_are_patched_in(
    gpu: Gpu, rng: np.random.Generator, d: int, layout: str, kernel: str, dtype: str
) -> None:
    """Checks in full are for the first call of a kind only, and kernels for each tile."""
    for n in range(12):
        q, k, v = random_inputs(rng, dtype, **lengths(rng), d=d)
        given = [x if layout == "bhsd" else x.swapaxes(1, 2).copy() for x in (q, k, v)]
        for out in (None, on_gpu(np.full_like(given[0], np.nan))) if n else (None,):
            options: dict[str, Any] = {"causal": True, "layout": layout, "kernel": kernel}
            inputs = map(on_gpu, given)
            result, lse = cufa.attention(*inputs, **options, out=out, return_lse=True)
            assert out is None or result is out
            result = result if layout == "bhsd" else result.swapaxes(1, 2)
            assert_accepted(result, lse, q, k, v, causal=True)
    assert gpu.parsed == 1
    assert len(gpu.loaded) == len(set(gpu.loaded))


LENGTHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"features": (Causal(),)},
    "a window": {"features": (Window(100, 50),)},
    "a negative scale": {"scale": -0.3, "features": (Causal(),)},
    "float32": {"dtype": "float32"},
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_new_lengths_are_launched_as_in_a_first_call(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kind: str, layout: str
) -> None:
    """Hundreds of calls, which take over the findings of earlier ones of the kind."""
    rng = random.Random(kind)
    told: list[Any] = []

    def kernel(variant: Variant, *_: Any) -> Any:
        def launched(grid: Any, block: Any, args: Any, smem_bytes: int) -> None:
            content = ctypes.string_at(args[0].ptr, variant.parameter.itemsize)
            told.append((variant, grid, block, smem_bytes, content))

        return launched

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(counters.Counters, "take", lambda _: 4096)
    monkeypatch.setattr(scratch.Scratch, "take", lambda _, floats: 8192 + floats)
    base = Problem("bfloat16", 1, 8, 8, 1, 1, 64, 64, 0.3)._replace(**LENGTHS[kind])
    size = DTYPES[base.dtype].itemsize

    def of_kind() -> prepare.PreparedCalls:
        return prepare.PreparedCalls(base, layout, NO_EXTRAS)

    def array(batch: int, heads: int, seq: int, room: int) -> tuple[Any, Any]:
        """Return shape and strides; of a cache with room, its first rows."""
        shape = (batch, heads, room) if layout == "bhsd" else (batch, room, heads)
        strides = np.empty((*shape, 64), f"V{size}").strides
        return ((batch, heads, seq, 64) if layout == "bhsd" else (batch, seq, heads, 64)), strides

    def launched(kind: prepare.PreparedCalls, key: Any) -> Any:
        call = kind.prepare(key, 512)
        assert call is not None
        told.clear()
        call.launch(16, 32, 48, 64, 80)
        return call[1:], *told

    shared = of_kind()
    for longest in (20, 700, 700, 3000) * 40:
        batch, hq, hk = rng.choice(((1, 8, 8), (1, 8, 8), (2, 8, 2), (3, 71, 1)))
        sq, sk = (rng.randint(1, n) for n in (rng.choice((1, 130, longest)), longest))
        room = rng.choice((sk, 3000))
        arrays = array(batch, hq, sq, sq), *[array(batch, hk, sk, room)] * 2
        key = *(part for each in arrays for part in each), (True, True, True), None, ()
        assert launched(shared, key) == launched(of_kind(), key), key


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_cache_that_grows(gpu: Gpu, rng: np.random.Generator, layout: Layout) -> None:
    """Only the map of K is made, which is that of V where it lies alike."""
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=8, hk=2, sq=1, sk=40, d=64)
    given = [on_gpu(x if layout == "bhsd" else x.swapaxes(1, 2).copy()) for x in (q, k, v)]
    for n in range(1, 40):
        parts = [x[:, :, :n] if layout == "bhsd" else x[:, :n] for x in given[1:]]
        encoded = len(gpu.driver.encoded)
        for _ in range(3):  # layers
            both: Any = cufa.attention(given[0], *parts, layout=layout, return_lse=True)
            out, lse = both
            out = out if layout == "bhsd" else out.swapaxes(1, 2)
            assert_accepted(out, lse, q, k[:, :, :n], v[:, :, :n])
        # Where the number of keys comes to the next step, another variant may take the call.
        assert n <= 2 or n % KEY_STEP == 1 or len(gpu.driver.encoded) == encoded + 1
    assert gpu.parsed == 1


def test_v_that_lies_unlike_k(gpu: Gpu, rng: np.random.Generator) -> None:
    """In its rows, or its head dim."""
    for dv, step in ((64, 2), (32, 1)):
        for n in (5, 6, 7):
            q, k, v = random_inputs(rng, "bfloat16", b=2, hq=2, sq=3, sk=n, d=64, dv=dv)
            apart = on_gpu(np.repeat(v, step, axis=2))[:, :, ::step]
            assert_accepted(cufa.attention(on_gpu(q), on_gpu(k), apart), None, q, k, v)


#: Changes that make a legal call of new lengths illegal, the error and how it begins.
SPOILERS: dict[str, tuple[Any, type[Exception], str]] = {
    "q rank": (lambda c: {"q": c["q"][0]}, ValueError, "k has shape"),
    "vectors": (lambda c: {n: c[n][0, 0, 0] for n in "qkv"}, ValueError, "q has shape"),
    "5 axes": (lambda c: {n: c[n][None] for n in "qkv"}, ValueError, "q has shape"),
    "k rank": (lambda c: {"k": c["k"][0]}, ValueError, "k has shape"),
    "k batch": (lambda c: {"k": c["k"][:1]}, ValueError, "k has shape .* batch 1 and 2"),
    "v batch": (lambda c: {"v": c["v"][:1]}, ValueError, "v has shape .* batch 1 and 2"),
    "k head_dim": (lambda c: {"k": c["k"][..., :8]}, ValueError, "k has shape .* head_dim"),
    "k seq": (lambda c: {"k": c["k"][:, :, 1:]}, ValueError, "v has shape .* seq"),
    "v heads": (lambda c: {"v": c["v"][:, :1]}, ValueError, "v has shape .* heads"),
    "heads": (lambda c: {"q": c["q"][:, :3]}, ValueError, "q has shape .* heads 3"),
    "k dtype": (lambda c: {"k": on_gpu(c["k"].host.astype(np.float32))}, TypeError, "k has dtype"),
    "k bytes": (lambda c: {"k": odd_bytes(c["k"])}, ValueError, "k .* no multiple of 2 bytes"),
    "out rank": (lambda c: {"out": c["out"][0]}, ValueError, "out has shape"),
    "out shape": (lambda c: {"out": c["out"][:, :, 1:]}, ValueError, "out has shape"),
    "out itself": (lambda c: {"out": broadcast(c["out"][:1], c["out"].shape)}, ValueError, "out"),
    "out v": (lambda c: {"out": c["v"][:, :, :7]}, ValueError, "out .* memory with v"),
    "out bytes": (lambda c: {"out": odd_bytes(c["out"])}, ValueError, "out .* no multiple of 2"),
    "out dtype": (
        lambda c: {"out": on_gpu(c["out"].host.astype(np.float32))},
        TypeError,
        "out has dtype",
    ),
}


def odd_bytes(array: Array) -> Array:
    """Return a copy at an address that is odd."""
    memory = np.zeros(array.host.nbytes + 1, np.uint8)
    there = array.view_of(memory[1:].view(array.dtype).reshape(array.shape))
    there[...] = array
    return there


@pytest.mark.parametrize("spoiler", sorted(SPOILERS))
def test_new_lengths_that_are_illegal(gpu: Gpu, rng: np.random.Generator, spoiler: str) -> None:
    changes, error, message = SPOILERS[spoiler]
    checked(legal(rng, hk=4))
    call = legal(rng, hq=4, hk=4, sq=7, sk=9)
    call["out"] = on_gpu(np.full((2, 4, 7, 64), 7, np.float16))
    given = {**call, **changes(call)}
    launches = len(gpu.launches)
    for _ in range(2):
        with pytest.raises(error, match=f"^{message}"):
            cufa.attention(**given)
        assert len(gpu.launches) == launches
    checked(call)


# --- calls that are captured into a graph ---


@kernels
def test_captured_calls_allocate_their_results_alone(
    gpu: Gpu, rng: np.random.Generator, kernel: str, dtype: str
) -> None:
    if kernel == "fa1_fp32":
        pytest.skip("it needs memory")
    call = legal(rng, dtype, d=64)
    out = checked(call, kernel=kernel, causal=True)
    gpu.stream = Stream(capturing=True)
    gpu.allocated.clear()
    checked({**call, "out": out}, kernel=kernel, causal=True)
    assert gpu.allocated == []
    cufa.attention(**call, kernel=kernel, causal=True, return_lse=True)
    assert gpu.allocated == [(2, 4, 8, 64), (2, 4, 8)]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("kernel", ["fa2_mma", "fa3_wgmma"])
def test_copies_that_are_captured(
    gpu: Gpu, rng: np.random.Generator, kernel: str, name: str, known: bool
) -> None:
    call = {**legal(rng), "out": on_gpu(np.full((2, 4, 8, 64), np.nan, np.float16))}
    call[name] = one_in(call[name].host)
    if known:
        checked(call, kernel=kernel)
    gpu.stream = Stream(capturing=True)
    if name == "out" and kernel == "fa2_mma":  # which writes rows of any alignment
        checked(call, kernel=kernel)
        return
    gpu.allocated.clear()
    launches = len(gpu.launches)
    with pytest.raises(ValueError, match=rf"^{name} \(shape \(2, 4, 8, 64\), strides .* copied"):
        cufa.attention(**call, kernel=kernel)
    assert gpu.allocated == []
    assert len(gpu.launches) == launches


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"d": 59}, {}, r"q \(shape \(2, 4, 8, 59\)"),
        ({"d": 64, "dv": 59}, {}, r"v \(shape \(2, 4, 8, 59\)"),
        ({}, {"scale": -0.5}, r"q .* copied.* scale is -0.5"),
    ],
)
def test_more_copies_that_are_captured(
    gpu: Gpu, rng: np.random.Generator, sizes: dict[str, Any], options: Any, message: str
) -> None:
    call = legal(rng, **sizes)
    cufa.attention(**call, **options)
    gpu.stream = Stream(capturing=True)
    with pytest.raises(ValueError, match=f"^{message}"):
        cufa.attention(**call, **options)


def test_a_workspace_is_not_captured(gpu: Gpu, rng: np.random.Generator) -> None:
    call = legal(rng, "float32")
    checked(call, kernel="fa1_fp32")
    gpu.stream = Stream(capturing=True)
    gpu.allocated.clear()
    with pytest.raises(ValueError, match=r"^kernel: fa1_fp32 needs memory"):
        cufa.attention(**call, kernel="fa1_fp32")
    assert gpu.allocated == []


# --- calls that run as those of `decode` do ---


def long(rng: np.random.Generator, dtype: str = "bfloat16", **sizes: int) -> dict[str, Any]:
    """Return one query and many keys."""
    return legal(rng, dtype, **{"b": 1, "hq": 4, "hk": 2, "sq": 1, "sk": 2000, "d": 64, **sizes})


@dtypes
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_few_queries_beside_many_keys(
    gpu: Gpu, rng: np.random.Generator, layout: str, dtype: str
) -> None:
    for repeat in range(3):
        for causal, sq, d in ((False, 1, 64), (True, 3, 64), (True, 1, 59), (False, 2, 59)):
            call = long(rng, dtype, sq=sq, d=d, sk=2000 + repeat)
            q, k, v = (call[name].host for name in "qkv")
            if layout == "bshd":
                call = {n: on_gpu(x.host.swapaxes(1, 2).copy()) for n, x in call.items()}
            options: dict[str, Any] = {"causal": causal, "layout": layout}
            assert isinstance(cufa.explain(**call, **options), DecodePlan)
            gpu.parsed = 0
            for out in (None, on_gpu(np.full_like(call["q"].host, np.nan))):
                found, lse = cufa.attention(**call, **options, out=out, return_lse=True)
                assert out is None or found is out
                found = found.get() if layout == "bhsd" else found.get().swapaxes(1, 2)
                assert_accepted(found, lse, q, k, v, causal=causal)
            assert gpu.parsed == (repeat == 0)
    assert {each.kernel for each in gpu.launches} == {"decode"}


def test_ranks_of_few_queries(gpu: Gpu, rng: np.random.Generator) -> None:
    call = long(rng, hq=1, hk=1)
    hosts = [call[name].host for name in "qkv"]
    for axes in ((0, 0), (slice(None), 0)):
        out, lse = cufa.attention(**{n: x[axes] for n, x in call.items()}, return_lse=True)
        assert out.shape == call["q"][axes].shape
        out, lse = out.get().reshape(1, 1, 1, 64), lse.get().reshape(1, 1, 1)
        assert_accepted(out, lse, *hosts)
    assert {each.kernel for each in gpu.launches} == {"decode"}


@pytest.mark.parametrize("scale", [-0.4, 0])
def test_views_and_scales_of_few_queries(gpu: Gpu, rng: np.random.Generator, scale: float) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=4, hk=2, sq=2, sk=2000, d=64)
    for view in sorted(VIEWS):
        make, _ = VIEWS[view]
        for _ in range(2):
            out, lse = cufa.attention(*map(make, (q, k, v)), scale=scale, return_lse=True)
            assert_accepted(out, lse, q, k, v, scale=scale)
    shared = [on_gpu(q), *(broadcast(on_gpu(x[:1]), x.shape) for x in (k, v))]
    hosts = [x.get() for x in shared]
    gpu.allocated.clear()
    assert_accepted(cufa.attention(*shared), None, *hosts)
    assert k.shape not in gpu.allocated
    assert {each.kernel for each in gpu.launches} == {"decode"}


def test_a_cache_that_grows_changes_its_kernel(gpu: Gpu, rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float16", b=1, hq=4, hk=2, sq=1, sk=800, d=64)
    arrays = [on_gpu(x) for x in (q, k, v)]
    for n in range(20, 800, 7):
        parts = [x[:, :, :n] for x in arrays[1:]]
        assert_accepted(cufa.attention(arrays[0], *parts), None, q, k[:, :, :n], v[:, :, :n])
    kernels = [each.kernel for each in gpu.launches]
    changes = kernels.index("decode")
    assert changes > 0
    assert set(kernels[:changes]) == {"fa3_wgmma"}
    assert set(kernels[changes:]) == {"decode"}
    assert gpu.parsed == 1


def test_few_queries_are_captured(
    gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as memory is set aside: then by a kernel that needs none."""
    call = long(rng)
    out = checked(call)
    gpu.stream = Stream(capturing=True)
    for number in range(10):
        monkeypatch.setattr(scratch, "current_capture", lambda number=number: (number, 0))
        for return_lse in (False, True):
            gpu.allocated.clear()
            cufa.attention(**call, out=out, return_lse=return_lse)
            assert gpu.allocated == ([(1, 4, 1)] if return_lse else [])
            checked(call)
        expected = "decode" if number < 8 else "fa3_wgmma"
        assert {each.kernel for each in gpu.launches[-4:]} == {expected}
    gpu.stream = Stream()
    checked(call)
    assert gpu.launches[-1].kernel == "decode"


def test_few_queries_are_captured_by_a_kernel_whose_blocks_draw_tiles(
    gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = device.named("h200")._replace(sm_count=2)
    monkeypatch.setattr(device, "of_id", lambda device_id: few)
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=4, hk=4, sq=2, sk=4096, d=64)
    arrays = [on_gpu(x) for x in (q, k, v)]
    out = cufa.attention(*arrays, causal=True)
    assert gpu.launches[-1].kernel == "decode"
    gpu.stream = Stream(capturing=True)
    for number in range(9):
        monkeypatch.setattr(scratch, "current_capture", lambda number=number: (number, 0))
        assert_accepted(cufa.attention(*arrays, causal=True, out=out), None, q, k, v, causal=True)
    assert gpu.launches[-1].kernel == "fa3_wgmma"


@pytest.mark.parametrize("known", [False, True])
def test_few_queries_that_are_captured_without_a_call_before(
    gpu: Gpu, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(scratch, "current_capture", lambda: (1, 0))
    call = long(rng)
    if known:
        checked(legal(rng))  # a call, but not one like it
    gpu.stream = Stream(capturing=True)
    checked(call)
    assert gpu.launches[-1].kernel == "fa3_wgmma"
    call["k"] = call["k"].view_of(np.broadcast_to(call["k"].host[:, :, :1], call["k"].shape))
    with pytest.raises(ValueError, match=r"^k .* would be copied"):  # TMA cannot stay at a key
        cufa.attention(**call)
