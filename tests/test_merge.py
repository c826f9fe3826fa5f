"""merge: attention over parts of the keys, put together."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import host_kernels
import ml_dtypes
import numpy as np
import played_gpu
import pytest
from exhaustive import exhaustive
from played_gpu import Gpu, Stream, on_gpu
from reference import DTYPES, Expected, random_inputs, to_host

import cufa
from cufa import device
from cufa.compiler import jit, nvrtc
from cufa.specs.instance import Instance
from cufa.specs.merge import SPEC


def parts_of(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, ends: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Attention over the keys up to the first end, from there to the second, and so on."""
    outs, lses = [], []
    for begin, end in zip((0, *ends), (*ends, k.shape[2]), strict=True):
        out, lse = cufa.attention(q, k[:, :, begin:end], v[:, :, begin:end], return_lse=True)
        outs.append(out)
        lses.append(lse)
    return outs, lses


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ends", [(), (5,), (0, 5, 5, 40, 60), range(1, 60)], ids=len)
def test_is_attention_over_all_keys(rng: np.random.Generator, ends: Any, dtype: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=2, sq=7, sk=60, d=16, dv=9)
    out, lse = cufa.merge(*parts_of(q, k, v, ends))
    assert out.dtype == q.dtype
    Expected(q, k, v).assert_accepts(out, lse)


def test_layouts_and_ranks(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", b=2, hq=4, hk=2, sq=7, sk=60, d=16)
    outs, lses = parts_of(q, k, v, (13,))
    expected, expected_lse = cufa.merge(outs, lses)
    turned = np.stack(outs).swapaxes(2, 3)
    out, lse = cufa.merge(turned, np.stack(lses), layout="bshd")
    np.testing.assert_array_equal(out.swapaxes(1, 2), expected)
    np.testing.assert_array_equal(lse, expected_lse)
    for index in ((slice(None), 1), (1, 1)):
        out, lse = cufa.merge([x[index] for x in outs], tuple(x[index] for x in lses))
        np.testing.assert_array_equal(out, expected[index])
        np.testing.assert_array_equal(lse, expected_lse[index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_may_have_another_dtype(rng: np.random.Generator, dtype: str) -> None:
    q, k, v = random_inputs(rng, "float32", hq=2, sq=7, sk=60, d=16)
    outs, lses = parts_of(q, k, v, (13,))
    expected, _ = cufa.merge(outs, lses)
    out = np.full((1, 7, 2, 16), np.nan, DTYPES[dtype]).swapaxes(1, 2)
    assert cufa.merge(outs, lses, out=out)[0] is out
    np.testing.assert_array_equal(out, expected.astype(DTYPES[dtype]))


def test_parts_that_saw_no_key_are_not_read() -> None:
    out = np.array([[[1.0, 2]], [[np.nan, np.inf]]], np.float32)
    lse = np.array([[0.5], [-np.inf]], np.float32)
    for order in (slice(None), slice(None, None, -1)):
        merged, merged_lse = cufa.merge(out[order], lse[order])
        np.testing.assert_array_equal(merged, [[1, 2]])
        np.testing.assert_array_equal(merged_lse, [0.5])
    merged, merged_lse = cufa.merge(out[1:], lse[1:])
    np.testing.assert_array_equal(merged, [[0, 0]])
    np.testing.assert_array_equal(merged_lse, [-np.inf])


def test_infinities_outweigh_and_nan_spreads() -> None:
    outs = np.array([[[1.0]], [[2.0]], [[4.0]]], np.float32)

    def merged(*lses: float) -> tuple[float, float]:
        out, lse = cufa.merge(outs[: len(lses)], np.array(lses, np.float32)[:, None])
        return float(out[0, 0]), float(lse[0])

    assert merged(3, np.inf, -np.inf) == (2, np.inf)
    assert merged(np.inf, np.inf, 0) == (1.5, np.inf)
    assert merged(1e30, -1e30, 0) == (1, np.float32(1e30))
    assert np.isnan(merged(0, np.nan, 1)).all()
    assert np.isnan(merged(-np.inf, np.nan)).all()


ONE = np.zeros((2, 3, 4, 8), np.float32)
LSE = np.zeros((2, 3, 4), np.float32)
BAD: list[tuple[str, Any, Any, dict[str, Any], type[Exception], str]] = [
    ("none", [], [], {}, ValueError, "outs has no parts"),
    ("unequal", [ONE], [LSE, LSE], {}, ValueError, "lses has 2 parts, but outs has 1"),
    ("no array", 1, LSE, {}, TypeError, "outs must be a NumPy or a CuPy array"),
    ("no axes", np.zeros((), np.float32), LSE, {}, ValueError, "first axis"),
    ("no arrays", [[1.0]], [LSE], {}, TypeError, r"outs\[0\] must be"),
    ("dtype", [ONE, ONE.astype("f2")], [LSE] * 2, {}, TypeError, r"outs\[1\] has dtype float16"),
    ("lse dtype", [ONE], [LSE.astype("f8")], {}, TypeError, r"lses\[0\] has dtype float64"),
    ("shape", [ONE, ONE[1:]], [LSE] * 2, {}, ValueError, r"outs\[1\] has shape \(1, 3, 4, 8\)"),
    ("lse shape", [ONE], [LSE[..., 1:]], {}, ValueError, r"lses\[0\] has shape \(2, 3, 3\)"),
    ("layout", [ONE], [LSE], {"layout": "bshd"}, ValueError, r"lses\[0\] .* \(2, 4, 3\)"),
    ("rank", [ONE[None]], [LSE[None]], {}, ValueError, r"outs\[0\] .* 2 to 4 axes"),
    ("out", [ONE], [LSE], {"out": ONE[..., 1:]}, ValueError, "out has shape"),
    ("out dtype", [ONE], [LSE], {"out": ONE.astype("f8")}, TypeError, "out has dtype float64"),
    ("out shared", [ONE], [LSE], {"out": ONE}, ValueError, r"out .* shares memory with outs\[0\]"),
]


@pytest.mark.parametrize(
    ("outs", "lses", "options", "error", "message"),
    [case[1:] for case in BAD],
    ids=[case[0] for case in BAD],
)
def test_bad_input(
    outs: Any, lses: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cufa.merge(outs, lses, **options)


# --- the kernel ---


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", DTYPES)
@exhaustive("others", one_in=3)
def test_compiles_without_spills(dtype: str, arch: str) -> None:
    for of_out in {dtype, "float32"}:
        for elements in (1, 16 // DTYPES[dtype].itemsize):
            instance = Instance("merge", (dtype, of_out), (elements,))
            compiled = nvrtc.compile_variant(instance, device.of_arch(arch).arch)
            assert compiled.spill_bytes == compiled.stack_bytes == 0
            assert "warning" not in compiled.log.lower()


def test_parameter_fits() -> None:
    assert SPEC.params.itemsize <= 4096


def some_parts(
    rng: np.random.Generator, parts: int, d: int, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Random parts, with what no float32 holds and rows that have seen no key among them."""
    outs = rng.standard_normal((parts, 2, 3, 5, d), np.float32).astype(DTYPES[dtype])
    lses = 5 * rng.standard_normal((parts, 2, 3, 5), np.float32)
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    lses[:, 0, 0, 0] = -np.inf
    lses[0, 0, 0, 1:4] = np.inf, np.nan, 1e30
    outs[lses == -np.inf] = np.nan
    return outs, lses


def assert_agrees(out: Any, lse: Any, outs: np.ndarray, lses: np.ndarray) -> None:
    """Assert that it is what the CPU computes."""
    out, lse = to_host(out), to_host(lse)
    expected = np.empty(outs.shape[1:], out.dtype)
    _, expected_lse = cufa.merge(outs, lses, out=expected)
    rounding = max(2 * float(ml_dtypes.finfo(out.dtype).eps), 4e-6)
    out, expected = out.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(out, expected, rounding, rounding)
    np.testing.assert_allclose(lse, expected_lse, 2e-6, 2e-6)


@pytest.fixture(scope="module")
def on_host() -> dict[Instance, Any]:
    instances = [
        Instance("merge", (dtype, of_out), (elements,))
        for dtype in DTYPES
        for of_out in DTYPES
        for elements in (1, 16 // DTYPES[dtype].itemsize)
    ]
    return host_kernels.compiled("MergeParams", instances)


@pytest.fixture
def played(
    monkeypatch: pytest.MonkeyPatch, gpu: played_gpu.Gpu, on_host: dict[Instance, Any]
) -> list[Instance]:
    """Play a GPU that runs the kernel's own source; what it launches is listed."""
    launched: list[Instance] = []

    def kernel(instance: Instance, _gpu: Any, _device_id: int) -> Any:
        launched.append(instance)
        return on_host[instance]

    monkeypatch.setattr(jit, "kernel", kernel)
    return launched


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 5, 8, 64, 256])
@pytest.mark.parametrize("parts", [1, 7, 128])
def test_kernel_agrees_with_the_cpu(
    rng: np.random.Generator, played: list[Instance], parts: int, d: int, dtype: str
) -> None:
    outs, lses = some_parts(rng, parts, d, dtype)
    arrays = [[played_gpu.on_gpu(x) for x in each] for each in (outs, lses)]
    for of_out in DTYPES:
        out = played_gpu.Array(outs.shape[1:], DTYPES[of_out])
        _, lse = cufa.merge(*arrays, out=out)
        assert_agrees(out, lse, outs, lses)
        chunk = 16 // DTYPES[dtype].itemsize
        whole = d % chunk == 0 and d * out.itemsize % 16 == 0
        assert played[-1].arguments == (chunk if whole else 1,)


def test_kernel_takes_strides_and_odd_addresses(
    rng: np.random.Generator, played: list[Instance]
) -> None:
    outs, lses = some_parts(rng, 2, 8, "float16")
    turned = [played_gpu.on_gpu(x.swapaxes(1, 2)).swapaxes(1, 2) for x in outs]
    turned_lses = [played_gpu.on_gpu(x.swapaxes(0, 2)).swapaxes(0, 2) for x in lses]
    assert_agrees(*cufa.merge(turned, turned_lses), outs, lses)
    odd = [played_gpu.one_in(x) for x in outs]
    assert_agrees(*cufa.merge(odd, turned_lses), outs, lses)
    assert [each.arguments for each in played] == [(8,), (1,)]


@pytest.mark.parametrize("parts", [129, 300])
def test_many_parts_take_one_launch(
    rng: np.random.Generator, played: list[Instance], parts: int
) -> None:
    outs, lses = some_parts(rng, parts, 8, "float32")
    lses[[1, 2, parts - 1], 1] = np.inf  # each as much as the other, wherever they are
    arrays = [[played_gpu.on_gpu(x) for x in each] for each in (outs, lses)]
    assert_agrees(*cufa.merge(*arrays), outs, lses)
    assert len(played) == 1


def test_what_needs_memory_is_refused_in_a_capture(gpu: Gpu) -> None:
    """Copies of parts that lie unlike each other, the result of odd strides, many addresses."""
    x, of_x = np.ones((1, 2, 5, 16), np.float32), np.zeros((1, 2, 5), np.float32)
    out, lse = on_gpu(x), on_gpu(of_x)
    turned = on_gpu(x.swapaxes(2, 3).copy()).swapaxes(2, 3)
    apart = on_gpu(x.swapaxes(1, 2).copy()).swapaxes(1, 2)
    of_apart = on_gpu(of_x.swapaxes(1, 2).copy()).swapaxes(1, 2)
    calls: dict[str, tuple[Any, ...]] = {
        r"outs: of shape .* have different strides, and copies": ([out, apart], [lse, lse]),
        r"lses: of shape .* have different strides, and copies": ([out, out], [lse, of_apart]),
        r"out: of strides .* the result": ([out, out], [lse, lse], turned),
        r"outs: the addresses of more than 128": ([out] * 130, [lse] * 130),
    }
    for message, (outs, lses, *into) in calls.items():
        options = {"out": into[0]} if into else {}
        gpu.stream = Stream()
        cufa.merge(outs, lses, **options)
        gpu.stream = Stream(capturing=True)
        with pytest.raises(ValueError, match=f"^{message} would need memory, .*: give fewer, "):
            cufa.merge(outs, lses, **options)
    assert len(gpu.launches) == len(calls)


def test_more_rows_than_the_kernel_can_count(played: list[Instance]) -> None:
    shape = (2**11, 2**10, 2**10)
    out, lse = (np.broadcast_to(np.float32(0), each) for each in ((*shape, 1), shape))
    arrays = [[played_gpu.Array(x.shape, x.dtype, x)] for x in (out, lse)]
    with pytest.raises(ValueError, match=r"outs\[0\] has shape .*: more rows than 2147483647"):
        cufa.merge(*arrays)
    assert not played


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 5, 8, 64, 111, 256])
@pytest.mark.parametrize("parts", [1, 2, 7, 128, 300])
def test_gpu_agrees_with_the_cpu(
    cupy: ModuleType, rng: np.random.Generator, parts: int, d: int, dtype: str
) -> None:
    outs, lses = some_parts(rng, parts, d, dtype)
    for of_out in {dtype, "float32"}:
        out = cupy.asarray(np.full(outs.shape[1:], np.nan, DTYPES[of_out]))
        _, lse = cufa.merge(cupy.asarray(outs), cupy.asarray(lses), out=out)
        assert_agrees(out, lse, outs, lses)


@pytest.mark.gpu
def test_gpu_takes_any_strides(cupy: ModuleType, rng: np.random.Generator) -> None:
    outs, lses = some_parts(rng, 2, 16, "float16")
    turned = [cupy.asarray(np.asfortranarray(x)) for x in outs]
    mixed = [cupy.asarray(outs[0]), cupy.asarray(outs[1].swapaxes(1, 2).copy()).swapaxes(1, 2)]
    cases: Any = turned, mixed
    for parts in cases:
        assert_agrees(*cufa.merge(parts, [cupy.asarray(x) for x in lses]), outs, lses)
