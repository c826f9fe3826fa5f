"""Arrays next to q, k and v: slopes, biases, masks, sinks; on the CPU and on a GPU."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernel_cases import KERNELS, SHAPES, inputs
from played_gpu import Gpu, on_gpu
from reference import assert_accepted, assert_call_accepted, random_inputs, to_host
from score_arrays import FEATURES, LIES, PAIRS, options_of, pairs

import cufa
from cufa import device
from cufa.planner.attention import Planner
from cufa.problem.problem import Problem

features = pytest.mark.parametrize("name", FEATURES)


@features
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_on_the_cpu(rng: np.random.Generator, dtype: str, name: str) -> None:
    for sizes in SHAPES:
        arrays = inputs(rng, dtype, sizes)
        options = options_of(rng, name, sizes)
        out, lse = cufa.attention(*arrays, return_lse=True, **options)
        assert_accepted(out, lse, *arrays, what=str(sizes), **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@features
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_on_the_gpu(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, name: str
) -> None:
    for sizes in SHAPES:
        for d in (64, 128, 192):
            arrays = inputs(rng, dtype, sizes, d)
            options = options_of(rng, name, sizes)
            given = [cupy.asarray(x) for x in arrays]
            there: dict[str, Any] = {
                k: cupy.asarray(x) if hasattr(x, "dtype") else x for k, x in options.items()
            }
            call = functools.partial(cufa.attention, *given, kernel=kernel, **there)
            assert_call_accepted(call, *arrays, what=f"{sizes}, {d}", **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("d", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("kernel", ["fa3_wgmma"])
def test_arrays_of_pairs_however_they_lie(
    cupy: Any, rng: np.random.Generator, kernel: str, d: int, kind: str
) -> None:
    """In chunks, and not so; of few rows, which share tiles, and of many."""
    for b, hq, hk, sq, sk in ((2, 8, 2, 13, 160), (1, 2, 1, 700, 1000), (2, 2, 1, 333, 525)):
        arrays = inputs(rng, "bfloat16", (b, hq, hk, sq, sk), d)
        given = [cupy.asarray(x) for x in arrays]
        host = pairs(rng, kind, (b, hq, sq, sk))
        argument = "bias" if "bias" in kind else "mask"
        for causal, window in ((False, None), (True, None), (True, 100)):
            options: dict[str, Any] = {"causal": causal, "window": (window, None)}
            found = []
            for lie, lay in LIES.items():
                options[argument] = lay(cupy.asarray, host)
                found.append(cufa.attention(*given, kernel=kernel, return_lse=True, **options))
                for x, y in zip(found[0], found[-1], strict=True):
                    assert to_host(x).tobytes() == to_host(y).tobytes(), f"{sk} keys, {lie}"
            assert_accepted(*found[0], *arrays, what=f"{sk} keys", **options | {argument: host})


def test_arrays_of_more_axes(xp: ModuleType, rng: np.random.Generator) -> None:
    """Than q has: those have length 1."""
    q, k, v = random_inputs(rng, "float32", b=2, sq=40, sk=70, d=16)
    mask = rng.random((2, 1, 40, 70)) < 0.5
    arrays = (
        ("bias", rng.standard_normal((2, 1, 40, 70), np.float32)),
        ("bias", rng.standard_normal((1, 1, 40, 1), np.float32)),
        *(("mask", mask), ("mask", np.packbits(mask, axis=-1))),
    )
    for name, array in arrays:
        three, two = ([xp.asarray(x[at]) for x in (q, k, v)] for at in (np.s_[:, 0], (0, 0)))
        for given, same, more in (
            (three, array[:, 0], [array]),
            (two, array[0, 0], [array[:1, 0], array[:1]]),
        ):
            call: dict[str, Any] = {name: xp.asarray(same)}
            expected = cufa.attention(*given, **call)
            for axes in more:
                call = {name: xp.asarray(axes)}
                found = cufa.attention(*given, **call)
                np.testing.assert_array_equal(to_host(found), to_host(expected))
            for bad in (more[-1][None], np.repeat(more[-1], 3, axis=0)):
                call = {name: xp.asarray(bad)}
                with pytest.raises(ValueError, match=f"^{name} has shape"):
                    cufa.attention(*given, **call)


def test_arrays_of_fewer_axes(xp: ModuleType, rng: np.random.Generator) -> None:
    """With 3-D arrays those of pairs are (b, sq, sk), and with 2-D ones (sq, sk)."""
    q, k, v = random_inputs(rng, "float32", b=3, sq=20, sk=30, d=8)
    bias = rng.standard_normal((3, 1, 20, 30), np.float32)
    slopes = np.array([0.5], np.float32)
    expected = cufa.attention(q, k, v, bias=bias, alibi_slopes=slopes)
    q, k, v, bias, slopes = (xp.asarray(x) for x in (q, k, v, bias, slopes))
    options = {"alibi_slopes": slopes}
    out = cufa.attention(q[:, 0], k[:, 0], v[:, 0], bias=bias[:, 0], **options)
    np.testing.assert_allclose(to_host(out), expected[:, 0], 1e-5, 1e-6)
    out = cufa.attention(q[1, 0], k[1, 0], v[1, 0], bias=bias[1, 0], **options)
    np.testing.assert_allclose(to_host(out), expected[1, 0], 1e-5, 1e-6)


def test_what_is_hidden_stays_hidden(xp: ModuleType, rng: np.random.Generator) -> None:
    """Infinities and NaN of hidden entries of a bias reach nothing, nor do they of hidden keys."""
    sizes = (1, 2, 1, 90, 150)
    for dtype in ("bfloat16", "float32"):
        arrays = inputs(rng, dtype, sizes, 64)
        mask = rng.random((90, 150)) < 0.5
        bias = rng.standard_normal((90, 150), np.float32)
        bad = np.where(mask, bias, rng.choice([np.inf, -np.inf, np.nan], (90, 150)))
        given = [xp.asarray(x) for x in arrays]
        options = {"mask": xp.asarray(mask), "causal": True, "return_lse": True}
        expected = cufa.attention(*given, bias=xp.asarray(bias), **options)
        found = cufa.attention(*given, bias=xp.asarray(bad.astype(np.float32)), **options)
        for x, y in zip(found, expected, strict=True):
            assert to_host(x).tobytes() == to_host(y).tobytes()


def test_sinks_of_any_size(xp: ModuleType, rng: np.random.Generator) -> None:
    """Large ones leave nothing of the values; without a key, the sink is all that there is."""
    sizes = (1, 6, 1, 40, 33)
    sinks = np.array([1e30, -1e30, np.inf, -np.inf, 200.0, np.nan], np.float32)
    for dtype in ("float16", "bfloat16", "float32"):
        arrays = inputs(rng, dtype, sizes, 32)
        given = [xp.asarray(x) for x in arrays]
        out, lse = cufa.attention(*given, sinks=xp.asarray(sinks), causal=True, return_lse=True)
        out, lse = to_host(out).astype(np.float32), to_host(lse)
        plain, plain_lse = cufa.attention(*given, causal=True, return_lse=True)
        for head in (0, 2, 4):
            np.testing.assert_allclose(out[:, head], 0, atol=2**-90)
            np.testing.assert_array_equal(lse[:, head], sinks[head])
        for head in (1, 3):
            assert out[:, head].tobytes() == to_host(plain).astype(np.float32)[:, head].tobytes()
            seen = to_host(plain_lse)[:, head] > -np.inf
            assert (lse[:, head][seen] == to_host(plain_lse)[:, head][seen]).all()
            assert (lse[:, head][~seen] == sinks[head]).all()
        assert np.isnan(lse[:, 5]).all()
        assert np.isnan(out[:, 5][to_host(plain_lse)[:, 5] > -np.inf]).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"alibi_slopes": ((3,), np.float32)}, ValueError, r"alibi_slopes has shape \(3,\): \(4,"),
        ({"alibi_slopes": ((3, 4), np.float32)}, ValueError, "alibi_slopes has shape"),
        ({"alibi_slopes": ((), np.float32)}, ValueError, "alibi_slopes has shape"),
        ({"alibi_slopes": ((4,), np.float64)}, TypeError, "alibi_slopes has dtype float64"),
        ({"sinks": ((2, 4), np.float32)}, ValueError, "sinks has shape"),
        ({"sinks": ((1,), np.float32)}, ValueError, "sinks has shape"),
        ({"sinks": ((4,), np.float16)}, TypeError, "sinks has dtype float16"),
        ({"bias": ((2, 4, 6, 5), np.float32)}, ValueError, "bias has shape"),
        ({"bias": ((1, 2, 4, 5, 6), np.float32)}, ValueError, "bias has shape"),
        ({"bias": ((5, 6), np.int32)}, TypeError, "bias has dtype int32"),
        ({"bias": ((5, 6), np.dtype(">f4"))}, TypeError, "bias has dtype float32 in non-native"),
        ({"mask": ((5, 7), np.bool_)}, ValueError, "mask has shape"),
        ({"mask": ((5, 6), np.uint8)}, ValueError, "mask has shape .* packed bits"),
        ({"mask": ((), np.uint8)}, ValueError, "mask has shape"),
        ({"mask": ((5, 6), np.int8)}, TypeError, "mask has dtype int8"),
    ],
    ids=str,
)
def test_bad_arrays(
    xp: ModuleType, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k = xp.ones((2, 4, 5, 8), np.float16), xp.ones((2, 2, 6, 8), np.float16)
    bad = {}
    for name, (shape, dtype) in options.items():
        if xp is not np and not np.dtype(dtype).isnative:
            pytest.skip("CuPy has no such dtype")
        bad[name] = xp.zeros(shape, dtype)
    for function in (cufa.attention, cufa.explain):
        for _ in range(2):
            with pytest.raises(error, match=f"^{message}"):
                function(q, k, k, **bad)


@pytest.mark.parametrize("keys", [1, 3, 15])
def test_bits_of_keys_that_there_are_not(keys: int) -> None:
    """Such as those of a mask with an element a key, which has the shape of one with bits."""
    q, k = np.ones((2, 4, 16, 8), np.float32), np.ones((2, 4, keys, 8), np.float32)
    mask = np.ones((16, -(-keys // 8)), np.uint8)
    with pytest.raises(ValueError, match=rf"^mask has bits beyond .* {keys} keys.*astype\(bool\)"):
        cufa.attention(q, k, k, mask=mask)
    packed = np.packbits(np.ones((16, keys), bool), axis=-1)
    np.testing.assert_array_equal(cufa.attention(q, k, k, mask=packed), 1)


@pytest.mark.parametrize("name", ["alibi_slopes", "bias", "mask", "sinks"])
def test_what_is_no_array_of_its_kind(name: str) -> None:
    q = np.ones((2, 4, 5, 8), np.float16)
    options: dict[str, Any] = {name: [1.0] * 4}
    with pytest.raises(TypeError, match=f"^{name} must be a NumPy or a CuPy array, not list"):
        cufa.attention(q, q, q, **options)


def test_a_kernel_that_reads_none() -> None:
    q = (1, 2, 30, 64)
    for name, argument in (("Alibi", "alibi_slopes"), ("Mask", "mask"), ("Sinks", "sinks")):
        problem = Problem.of_shapes(q, q, q, dtype="float32").reading(name)
        with pytest.raises(ValueError, match=f"{argument}: fa1_fp32"):
            Planner(problem, device.named("h200"), "fa1_fp32")(problem)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_what_is_no_array_after_a_call_without_one(
    gpu: Gpu, rng: np.random.Generator, dropout_p: float
) -> None:
    """On a played GPU: no number but a seed is one that may be, nor tiles in other places."""
    q, k, v = (on_gpu(x) for x in inputs(rng, "float16", (1, 2, 1, 8, 16)))
    tiles = cufa.BlockMask("true", on_gpu(np.ones((1, 1, 1, 1), np.uint8)), (128, 128), 8, 16)
    bias = on_gpu(np.zeros((8, 16), np.float32))
    options: dict[str, Any] = {"bias": bias, "dropout_p": dropout_p, "seed": 3}
    cufa.attention(q, k, v, **options)
    launches = len(gpu.launches)
    for name in ("alibi_slopes", "mask", "sinks", "lengths_k", "lengths_q"):
        for bad in (0, 5, True, tiles):
            with pytest.raises(TypeError, match=f"^{name} must be a NumPy or a CuPy array"):
                cufa.attention(q, k, v, **(options | {name: bad}))
    with pytest.raises(TypeError, match=r"^block_mask must be a BlockMask, not int"):
        cufa.attention(q, k, v, **(options | {"block_mask": 5}))
    assert len(gpu.launches) == launches


@pytest.mark.parametrize(
    ("name", "shape", "strides", "dtype"),
    [
        ("bias", (1, 1, 5, 7), (2, 6, 28, 4), np.float32),
        ("mask", (1, 1, 5, 7), (2, 6, 7, 1), np.bool_),
        ("sinks", (1,), (3,), np.float32),
        ("alibi_slopes", (1, 1), (5, 3), np.float32),
    ],
)
def test_strides_that_do_not_count(
    gpu: Gpu, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any
) -> None:
    """Axes that have one element; on a GPU that is played."""
    q, k = (on_gpu(np.ones((1, 1, n, 64), np.float16)) for n in (5, 7))
    base = on_gpu(np.ones(35, dtype))
    view = np.lib.stride_tricks.as_strided(base.host, shape, strides)
    options: dict[str, Any] = {name: base.view_of(view)}
    assert cufa.attention(q, k, k, **options) is not None
    assert len(gpu.launches) == 1


@pytest.mark.parametrize("changed", ["out", "shape", "dtype", "device", "kind"])
def test_a_call_that_is_like_another(gpu: Gpu, rng: np.random.Generator, changed: str) -> None:
    """Calls refuse what the first one refuses; on a GPU that the host plays."""
    q, k, v = (on_gpu(x) for x in inputs(rng, "float16", (1, 2, 1, 8, 16)))
    bias = on_gpu(rng.standard_normal((2, 8, 16), np.float32))
    for _ in range(2):
        cufa.attention(q, k, v, bias=bias)
    launches = len(gpu.launches)
    options: dict[str, Any] = {"bias": bias}
    if changed == "out":
        flat = on_gpu(np.zeros(4096, np.float16))
        options["bias"] = flat[:256].view_of(flat.host[:256].reshape(2, 8, 16))
        options["out"] = flat.view_of(flat.host[100 : 100 + 384].reshape(1, 2, 8, 24))
    elif changed == "shape":
        options["bias"] = bias[:, :7]
    elif changed == "dtype":
        options["bias"] = on_gpu(bias.host.astype(np.float64))
    elif changed == "device":
        options["bias"] = on_gpu(bias.host)
        options["bias"].device_id = 1
    else:
        options["bias"] = bias.host
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="bias"):
            cufa.attention(q, k, v, **options)
    assert len(gpu.launches) == launches


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["bias", "mask", "bits"])
def test_keys_for_which_an_array_is_too_short(
    gpu: Gpu, rng: np.random.Generator, name: str, causal: bool
) -> None:
    """A cache grows, next to an array that does not; on a GPU that the host plays."""
    q, k, v = (on_gpu(x) for x in inputs(rng, "float16", (1, 2, 2, 4, 200), 64))
    arrays = {
        "bias": rng.standard_normal((4, 100), np.float32),
        "mask": np.ones((4, 100), bool),
        "bits": np.full((4, 13), 255, np.uint8),
    }
    argument = "mask" if name == "bits" else name
    options: dict[str, Any] = {argument: on_gpu(arrays[name]), "causal": causal}
    one_for_all: dict[str, Any] = {argument: on_gpu(arrays[name][:, :1]), "causal": causal}
    for _ in range(2):
        cufa.attention(q, k[:, :, :100], v[:, :, :100], **options)
    launches = len(gpu.launches)
    for n in (105, 112, 130, 96):
        with pytest.raises(ValueError, match=rf"^{argument} has shape .* \(1, 2, 4, "):
            cufa.attention(q, k[:, :, :n], v[:, :, :n], **options)
    assert len(gpu.launches) == launches
    for n in () if name == "bits" else (100, 101, 112, 130):
        cufa.attention(q, k[:, :, :n], v[:, :, :n], **one_for_all)
