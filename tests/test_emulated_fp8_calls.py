"""Attention in 8 bits from `cufa.attention` on, by the kernels' source on the host."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from emulated import Emulator, emulate, needs_compiler
from exhaustive import exhaustive
from played_gpu import Gpu, Stream, on_gpu
from reference import DTYPES, oracle, random_inputs
from remembered8 import assert_packed_calls_agree

import cufa
from cufa import device
from cufa.launch import fp8
from cufa.planner.fp8 import Fp8Plan

#: Errors of results, relative to their root mean square. The GPU and NumPy each round P to four
#: bits, an error of 0.027 of it (rms). With other m these errors are independent: 0.038 together.
RMSE = 0.04
#: Scores up to 10 or so are sums of 14 bits, in several steps.
LSE_ERROR = 1e-2

#: Types are the concern of tests/test_types.py.
attention: Any = cufa.attention
explain: Any = cufa.explain

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]

FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (70, 9)},
    "chunk": {"attention_chunk": 100, "causal": True},
    "softcap": {"softcap": 20.0, "causal": True},
    "alibi": {"alibi_slopes": np.array([0.5, 0.1, 0.02, 0.3], np.float32)},
    "sinks": {"sinks": np.linspace(-1, 2, 4, dtype=np.float32)},
    "dropout": {"dropout_p": 0.25, "seed": 3},
    "lengths": {"lengths_k": np.array([0, 201]), "lengths_q": np.array([60, 177])},
    "lengths, all": {
        "lengths_k": np.array([150, 1]),
        "causal": True,
        "softcap": 3.0,
        "window": (90, None),
        "sinks": np.linspace(-1, 2, 4, dtype=np.float32),
    },
    "scale": {"scale": -0.2},
    "no scale": {"scale": 0.0, "causal": True},
}


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator()


@pytest.fixture(autouse=True)
def hopper(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Play a GPU of two multiprocessors."""
    few = device.named("h200")._replace(sm_count=2)
    monkeypatch.setattr(device, "of_id", lambda _: few)
    monkeypatch.setattr(fp8, "_prepared", {})
    return gpu


@pytest.fixture
def emulated(
    hopper: Gpu, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Emulator:
    """Let it run the kernels' source; warps take turns at random, or in order."""
    emulate(monkeypatch, emulator)
    seed = zlib.crc32(request.node.name.encode()) % 8
    emulator.last_first, emulator.seed = seed % 2 == 1, seed
    return emulator


def runs(test: Any) -> Any:
    return needs_compiler(pytest.mark.usefixtures("emulated")(test))


def there(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with their arrays on the GPU, but for lengths, which are on the host."""
    is_there = ("alibi_slopes", "sinks")
    return {name: on_gpu(x) if name in is_there else x for name, x in options.items()}


def drawn(rng: np.random.Generator, dtype: str, sizes: Any, d: int, dv: int) -> Arrays:
    """Draw q, k and v whose rows differ in size."""
    b, hq, hk, sq, sk = sizes
    q, k, v = random_inputs(rng, "float32", b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
    v *= np.exp(np.sin(np.arange(sk) / 90))[:, None]
    q, k, v = (x.astype(DTYPES[dtype]) for x in (q, k, v))
    return q, k, v


def assert_agrees(found: np.ndarray, expected: np.ndarray, error: float = RMSE) -> None:
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    assert np.isfinite(found).all()
    size = np.sqrt((expected**2).mean())
    assert np.sqrt(((found - expected) ** 2).mean()) <= error * size


def assert_same(lse: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected))
    seen = ~np.isneginf(expected)
    np.testing.assert_allclose(lse[seen], expected[seen], rtol=0, atol=LSE_ERROR)


@runs
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("return_lse", [False, True])
@exhaustive("fp8", but=lambda feature, return_lse: return_lse or feature == "softcap")
def test_features(rng: np.random.Generator, feature: str, return_lse: bool) -> None:
    """The result is that of NumPy arrays: the same bytes, and weights of as many bits."""
    q, k, v = drawn(rng, "bfloat16", (2, 4, 2, 177, 301), 64, 64)
    options = FEATURES[feature]
    if "lengths_k" in options:  # what is behind them may be anything
        for i, (keys, queries) in enumerate(
            zip(options["lengths_k"], options.get("lengths_q", (177, 177)), strict=True)
        ):
            k[i, :, keys:], v[i, :, keys:], q[i, :, queries:] = np.nan, np.nan, np.nan
    found = attention(
        *map(on_gpu, (q, k, v)), precision="fp8", return_lse=return_lse, **there(options)
    )
    expected = attention(q, k, v, precision="fp8", return_lse=True, **options)
    out = found[0] if return_lse else found
    assert_agrees(out.get(), expected[0])
    if return_lse:
        assert_same(found[1].get(), expected[1])


@runs
@pytest.mark.parametrize("d", [64, 96, 100, 128, 192, 256])
@exhaustive("fp8", but=lambda d: d in (100, 192))
def test_precision_is_close_to_16_bits(rng: np.random.Generator, d: int) -> None:
    """Rows of V that are no whole chunks are written to other memory first."""
    dv = 99 if d == 100 else 128 if d == 192 else d
    q, k, v = drawn(rng, "float16", (1, 2, 1, 70, 300), d, dv)
    out, lse = attention(*map(on_gpu, (q, k, v)), precision="fp8", return_lse=True)
    expected, expected_lse = oracle(q, k, v)
    assert_agrees(out.get(), expected, 0.08)
    np.testing.assert_allclose(lse.get(), expected_lse, rtol=0, atol=0.1)
    in_8_bits = attention(q, k, v, precision="fp8")
    assert_agrees(out.get(), in_8_bits)


@runs
@pytest.mark.parametrize(
    "how",
    [
        {"granularity": "head"},
        {"granularity": "tensor", "hadamard": True},
        {"block": 512},
        {"block": 128, "hadamard": True, "seed": 5},
    ],
    ids=str,
)
@exhaustive("fp8", but=lambda how: "hadamard" in how)
def test_quantized(rng: np.random.Generator, how: dict[str, Any]) -> None:
    arrays = drawn(rng, "float32", (2, 2, 1, 70, 300), 64, 64)
    eights = [cufa.quantize(on_gpu(x), **how) for x in arrays[:2]]
    how_v = {name: x for name, x in how.items() if name not in ("hadamard", "seed")}
    same = [cufa.quantize(x, **how) for x in arrays[:2]] + [cufa.quantize(arrays[2], **how_v)]
    found = []
    for transposed in (False, True):
        v8 = cufa.quantize(on_gpu(arrays[2]), transposed=transposed, **how_v)
        out = attention(*eights, v8, causal=True, out_dtype=np.float16)
        assert out.dtype == np.float16
        found.append(out.get())
    np.testing.assert_array_equal(*found)
    assert_agrees(found[0], attention(*same, causal=True, out_dtype=np.float32))


@runs
@pytest.mark.parametrize("d", [64, 256])
@exhaustive("fp8", but=lambda d: d == 64)
def test_quantized_with_lengths(rng: np.random.Generator, d: int) -> None:
    """NaN lies behind the lengths, and is in the bytes."""
    q, k, v = drawn(rng, "float16", (3, 2, 1, 70, 300), d, d)
    lengths: dict[str, Any] = {
        "lengths_k": np.array([0, 201, 129]),
        "lengths_q": np.array([9, 70, 3]),
    }
    for i, (keys, queries) in enumerate(zip(*lengths.values(), strict=True)):
        k[i, :, keys:], v[i, :, keys:], q[i, :, queries:] = np.nan, np.nan, np.nan
    options: dict[str, Any] = {
        "out_dtype": np.float16,
        "causal": True,
        "return_lse": True,
        **lengths,
    }
    expected, expected_lse = attention(*map(cufa.quantize, (q, k, v)), **options)
    q8, k8 = (cufa.quantize(on_gpu(x)) for x in (q, k))
    for transposed in (False, True):
        v8 = cufa.quantize(on_gpu(v), transposed=transposed)
        assert (v8.values.get() == 0x7F).any()
        out, lse = attention(q8, k8, v8, **options)
        assert_agrees(out.get(), expected)
        assert_same(lse.get(), expected_lse)


@runs
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("ndim", [2, 3, 4])
@exhaustive("fp8", but=lambda layout, ndim: (layout, ndim) in (("bshd", 4), ("bhsd", 2)))
def test_layouts_strides_and_out(rng: np.random.Generator, layout: Any, ndim: int) -> None:
    shape = (2, 100, 4, 64) if layout == "bshd" else (2, 4, 100, 64)
    wide = rng.standard_normal((3, *shape[-ndim:-1], 80), np.float32).astype(np.float16)
    q, k, v = (x[..., 8:72] for x in wide)
    given = [on_gpu(x)[..., 8:72] for x in wide]
    assert not given[0].flags.c_contiguous
    expected = attention(q, k, v, precision="fp8", layout=layout)
    out = on_gpu(np.full(wide.shape[1:], np.nan, np.float16))
    for first in (8, 5):  # rows that are aligned, and that are not
        into = out[..., first : first + 64]
        result = attention(*given, precision="fp8", layout=layout, out=into)
        assert result is into
        assert_agrees(into.get(), expected)
        out.host[..., first : first + 64] = np.nan
        assert np.isnan(out.host).all()
    assert_agrees(attention(*given, precision="fp8", layout=layout).get(), expected)


@runs
def test_no_keys_and_nothing(rng: np.random.Generator) -> None:
    q, k, v = (on_gpu(x) for x in drawn(rng, "float16", (2, 2, 1, 5, 0), 64, 64))
    sinks = np.array([0.5, -1], np.float32)
    out, lse = attention(
        q, k, v, precision="fp8", return_lse=True, sinks=on_gpu(sinks), causal=True
    )
    assert np.all(out.host == 0)
    np.testing.assert_allclose(lse.host, np.broadcast_to(sinks[:, None], (2, 2, 5)), rtol=1e-5)
    for nothing in ((q[:0], k[:0], v[:0]), (q[:, :, :0], k, v)):
        out, lse = attention(*nothing, precision="fp8", return_lse=True)
        assert 0 in out.shape
        assert lse.shape == out.shape[:-1]


@runs
@pytest.mark.parametrize("hadamard", [False, True])
def test_rows_that_see_nan_are_nan(rng: np.random.Generator, hadamard: bool) -> None:
    q, k, v = drawn(rng, "float16", (1, 2, 2, 200, 300), 64, 64)
    q[0, 0, 70, 3], k[0, 1, 260, 5] = np.nan, np.inf
    options: dict[str, Any] = {"causal": True, "out_dtype": np.float16, "return_lse": True}
    found = []
    for there in (np.asarray, on_gpu):
        q8, k8 = (cufa.quantize(there(x), hadamard=hadamard) for x in (q, k))
        out, lse = attention(q8, k8, cufa.quantize(there(v)), **options)
        found.append([x if there is np.asarray else x.get() for x in (out, lse)])
    for expected, its in zip(*found, strict=True):
        np.testing.assert_array_equal(np.isnan(its), np.isnan(expected))
    is_nan = np.isnan(found[1][1])[0]
    assert is_nan[0].nonzero()[0].tolist() == [70]
    assert is_nan[1].nonzero()[0].tolist() == list(range(160, 200))


@runs
def test_products_of_scales_that_float32_does_not_hold(rng: np.random.Generator) -> None:
    """Scores are 0 then, and not NaN where keys are hidden."""
    q, k, v = drawn(rng, "float32", (1, 2, 1, 70, 130), 64, 64)
    arrays = q * np.float32(1e-25), k * np.float32(1e-25), v
    options: dict[str, Any] = {"precision": "fp8", "causal": True, "return_lse": True}
    expected, expected_lse = attention(*arrays, **options)
    out, lse = attention(*map(on_gpu, arrays), out_dtype=np.float16, **options)
    assert_agrees(out.get(), expected)
    assert_same(lse.get(), expected_lse)


@runs
@pytest.mark.parametrize("score", [1e6, 3e7])
def test_equal_scores_have_equal_weights(score: float) -> None:
    """Also scores of which m, which is as large, moves by less or more than it should."""
    q, k = (np.full((1, 1, n, 64), np.sqrt(score / 8), np.float32) for n in (64, 512))
    v = np.repeat(np.eye(4, 64, dtype=np.float32), 128, axis=0)[None, None]
    arrays = (cufa.quantize(on_gpu(x)) for x in (q, k, v))
    weights = attention(*arrays, out_dtype=np.float16).get()[..., :4].astype(np.float32)
    np.testing.assert_allclose(weights, 0.25, rtol=0, atol=0.01)
    assert np.ptp(weights) <= 1e-3


@runs
def test_rounded_scores_do_not_decide_about_small_weights() -> None:
    """The last 128 keys have equal scores, and the others scores that are 11.3 below, in log2."""
    q, k, v = (np.zeros((1, 1, n, 64), np.float32) for n in (64, 2176, 2176))
    q[..., :2], q[..., 4], k[..., 3], k[:, :, :2048, 1], v[:, :, :2048] = 1, 448, 448, -8, 1
    found = []
    for score in (30, 36):  # times the scale, one is rounded up and one down
        k[..., 0] = score
        arrays = (cufa.quantize(on_gpu(x)) for x in (q, k, v))
        scale = 11.3 * float(np.log(2)) / 8
        found.append(attention(*arrays, out_dtype=np.float16, scale=scale).get())
    assert (found[0] > 0).all()
    np.testing.assert_array_equal(*found)


@runs
def test_the_same_bits_in_any_batch_and_again(rng: np.random.Generator) -> None:
    q, k, v = (on_gpu(x) for x in drawn(rng, "bfloat16", (3, 2, 2, 130, 200), 128, 128))
    options: dict[str, Any] = {"precision": "fp8", "causal": True, "batch_invariant": True}
    out = attention(q, k, v, **options).get()
    np.testing.assert_array_equal(attention(q, k, v, **options).get(), out)
    alone = attention(q[1:2], k[1:2], v[1:2], **options).get()
    np.testing.assert_array_equal(alone, out[1:2])


def test_explain_says_the_kernel(rng: np.random.Generator, hopper: Gpu) -> None:
    x = on_gpu(np.ones((1, 2, 300, 100), np.float16))
    for options in ({}, {"kernel": "fp8_wgmma"}):
        plan = explain(x, x, x, causal=True, precision="fp8", **options)
        assert isinstance(plan, Fp8Plan)
        assert str(plan).startswith("fp8_wgmma<float16, 128, 128, 192, 128,")
        assert plan.grid == 2
        attention(x, x, x, causal=True, precision="fp8", **options)
        assert hopper.launches[-1] == plan.variant
        assert [each.kernel for each in hopper.launches[-4:]] == ["quantize"] * 3 + ["fp8_wgmma"]
    x8 = cufa.quantize(x)
    assert explain(x8, x8, x8, causal=True, out_dtype=np.float16) == plan._replace(
        reason="the kernel of 8 bits"
    )


def ones(*shape: int, dtype: Any = np.float16) -> Any:
    return on_gpu(np.ones(shape, dtype))


X = (1, 2, 200, 64)
#: Calls that the kernel cannot do: the message, and the call.
REFUSED: dict[str, dict[str, Any]] = {
    r"bias: fp8_wgmma has no such scores; without precision": {
        "bias": lambda: ones(200, 200),
    },
    r"mask: fp8_wgmma has no such scores": {"mask": lambda: ones(200, 200, dtype=bool)},
    r"score_mod: fp8_wgmma has no such scores": {
        "score_mod": lambda: lambda score, b, h, q_idx, kv_idx: score + 1
    },
    r"mask_mod: fp8_wgmma has no such scores": {
        "mask_mod": lambda: lambda b, h, q_idx, kv_idx: q_idx > kv_idx
    },
    r"out_dtype: fp8_wgmma writes float16 or bfloat16, not float32": {
        "out_dtype": lambda: np.float32
    },
    r"kernel must be None or 'fp8_wgmma' in 8 bits, not 'fa3_wgmma'": {
        "kernel": lambda: "fa3_wgmma"
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_kernel_cannot_do_is_refused(message: str, hopper: Gpu) -> None:
    q, options = ones(*X), {name: make() for name, make in REFUSED[message].items()}
    for call in (cufa.attention, cufa.explain):
        with pytest.raises(ValueError, match=message):
            call(q, q, q, precision="fp8", **options)
    assert not hopper.launches


def test_kernels_of_another_type_are_refused() -> None:
    q = ones(*X)
    variant = explain(q, q, q).variant
    with pytest.raises(TypeError, match="kernel must be None or 'fp8_wgmma' in 8 bits, not Var"):
        attention(q, q, q, precision="fp8", kernel=variant)
    with pytest.raises(ValueError, match=r"not 'fp8_wgmma', which is for precision='fp8'"):
        attention(q, q, q, kernel="fp8_wgmma")


def test_float32_arrays_need_an_out_dtype() -> None:
    q = ones(*X, dtype=np.float32)
    with pytest.raises(ValueError, match=r"out_dtype: fp8_wgmma writes float16 or bfloat16"):
        attention(q, q, q, precision="fp8")
    assert attention(q, q, q, precision="fp8", out_dtype="float16").dtype == np.float16


@pytest.mark.parametrize("name", ["a100", "rtx4090", "b200"])
def test_other_gpus_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = ones(*X)
    x8 = cufa.quantize(q)
    gpu = device.named(name)
    monkeypatch.setattr(device, "of_id", lambda _: gpu)
    message = rf"precision: fp8_wgmma, the kernel of 8 bits, is for sm_90a, .* is {gpu.arch}; with"
    for call in (cufa.attention, cufa.explain):
        with pytest.raises(ValueError, match=message):
            call(q, q, q, precision="fp8")
        with pytest.raises(ValueError, match=message):
            call(x8, x8, x8, out_dtype=np.float16)


def test_sequences_that_the_kernel_cannot_take_are_refused(hopper: Gpu) -> None:
    x, offsets = ones(10, 2, 64), np.array([0, 4, 10], np.int32)
    x8 = cufa.quantize(x, layout="thd", cu_seqlens=offsets)
    packed = cufa.quantize(x, layout="thd")
    one = cufa.quantize(x, layout="thd", cu_seqlens=np.array([0, 10]))
    calls: Any = cufa.attention_varlen, cufa.explain_varlen
    for call in calls:
        for arrays, message in (
            ((packed, x8, x8), r"q was quantized without cu_seqlens: .*cu_seqlens=cu_seqlens_q\)"),
            ((x8, packed, x8), r"k was quantized without cu_seqlens: .*cu_seqlens=cu_seqlens_k\)"),
            ((x8, x8, one), "v was quantized with 1 sequences in cu_seqlens, but cu_seqlens_k has"),
        ):
            with pytest.raises(ValueError, match=message):
                call(*arrays, offsets, offsets, out_dtype=np.float16)
        bias: dict[str, Any] = {"bias": ones(1, 1, 10, 10), "max_seqlen_q": 10, "max_seqlen_k": 10}
        with pytest.raises(ValueError, match=r"bias: fp8_wgmma has no such scores"):
            call(x, x, x, offsets, offsets, precision="fp8", **bias)
    assert {each.kernel for each in hopper.launches} == {"quantize"}


VARLEN: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (70, 9)},
    "softcap": {"softcap": 20.0, "causal": True},
    "sinks": {"sinks": np.linspace(-1, 2, 4, dtype=np.float32), "causal": "top-left"},
    "alibi": {"alibi_slopes": np.array([0.5, 0.1, 0.02, 0.3], np.float32)},
    "dropout": {"dropout_p": 0.25, "seed": 3},
    "scale": {"scale": -0.2},
}
OFFSETS_Q = np.array([0, 5, 5, 205, 245, 246, 390], np.int32)
OFFSETS_K = np.array([0, 7, 10, 140, 230, 230, 431], np.int32)
USED = np.array([7, 2, 130, 64, 0, 150], np.int32)
attention_varlen: Any = cufa.attention_varlen


def ragged(rng: np.random.Generator, d: int, dtype: str = "bfloat16") -> Arrays:
    """Draw sequences of which each has its own magnitude; keys that are not in use are NaN."""
    sizes = (390, 4), (431, 2), (431, 2)
    q, k, v = (rng.standard_normal((*each, d), np.float32) for each in sizes)
    for i, (n, first, end) in enumerate(zip(USED, OFFSETS_K[:-1], OFFSETS_K[1:], strict=True)):
        v[first:end] *= 10.0 ** (i % 3)
        k[first + n : end] = v[first + n : end] = np.nan
    q, k, v = (x.astype(DTYPES[dtype]) for x in (q, k, v))
    return q, k, v


def assert_each_agrees(found: np.ndarray, expected: np.ndarray) -> None:
    """Sequences differ in magnitude."""
    for first, end in itertools.pairwise(OFFSETS_Q):
        if expected[first:end].any():
            assert_agrees(found[first:end], expected[first:end])
        else:
            assert not found[first:end].any()


@runs
@pytest.mark.parametrize("feature", VARLEN)
@pytest.mark.parametrize("d", [64, 128, 256])
@exhaustive("fp8", but=lambda feature, d: (feature, d) in (("causal", 64), ("none", 256)))
def test_varlen(rng: np.random.Generator, feature: str, d: int) -> None:
    """Rows that no sequence has are behind the last one on the GPU: 0, or as they were."""
    q, k, v = ragged(rng, d)
    lengths = OFFSETS_Q, OFFSETS_K
    options = {"precision": "fp8", "return_lse": True, **VARLEN[feature]}
    expected, expected_lse = attention_varlen(q, k, v, *lengths, seqused_k=USED, **options)
    more = np.full((3, 4, d), np.nan, q.dtype)
    given = [on_gpu(x) for x in (np.concatenate([q, more]), k, v)]
    there_lengths = [on_gpu(x) for x in lengths]
    options = {**there(options), "seqused_k": on_gpu(USED)}
    out, lse = attention_varlen(*given, *there_lengths, **options)
    assert_each_agrees(out.get(), expected)
    assert_same(lse.get()[:, :390], expected_lse)
    assert not out.get()[390:].any()
    assert (lse.get()[:, 390:] == -np.inf).all()
    wide = on_gpu(np.full((393, 4, d + 1), 7, q.dtype))  # rows that are no whole chunks
    into = wide[..., :d]
    attention_varlen(*given, *there_lengths, out=into, **options)
    np.testing.assert_array_equal(into.get()[:390], out.get()[:390])
    assert (wide.get()[390:] == 7).all()


@runs
@pytest.mark.parametrize("how", [{}, {"granularity": "head"}, {"granularity": "tensor"}], ids=str)
@exhaustive("fp8", but=lambda how: "granularity" not in how)
def test_varlen_of_quantized(rng: np.random.Generator, how: dict[str, Any]) -> None:
    q, k, v = ragged(rng, 128, "float16")
    lengths = OFFSETS_Q, OFFSETS_K
    eights = []
    for xp in (np.asarray, on_gpu):
        its: list[Any] = []
        for x, offsets, hadamard in (
            (q, lengths[0], True),
            (k, lengths[1], True),
            (v, lengths[1], False),
        ):
            both = {"layout": "thd", "hadamard": hadamard, "cu_seqlens": xp(offsets), **how}
            its.append(cufa.quantize(xp(x), **both))
        eights.append(its)
    options: dict[str, Any] = {"out_dtype": np.float16, "causal": True}
    expected = attention_varlen(*eights[0], *lengths, seqused_k=USED, **options)
    found = attention_varlen(
        *eights[1], *map(on_gpu, lengths), seqused_k=on_gpu(USED), **options
    ).get()
    assert_agrees(found, expected)
    turned = cufa.quantize(
        on_gpu(v), layout="thd", cu_seqlens=on_gpu(lengths[1]), transposed=True, **how
    )
    same = attention_varlen(
        *eights[1][:2], turned, *map(on_gpu, lengths), seqused_k=on_gpu(USED), **options
    )
    np.testing.assert_array_equal(same.get(), found)


@runs
def test_calls_like_another_read_their_own_arrays(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_packed_calls_agree(monkeypatch, rng, on_gpu, 64, (300, 400))


@runs
@exhaustive("fp8", but=lambda: True)
def test_warps_that_are_not_in_step(
    emulated: Emulator, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warp of short sequences is at the next tile while another writes the one before."""
    one = device.named("h200")._replace(sm_count=1)
    monkeypatch.setattr(device, "of_id", lambda _: one)
    for emulated.seed in (1, 2):
        queries, keys = rng.integers(1, 100, 10), rng.integers(1, 60, 10)
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (queries, keys))
        q = rng.standard_normal((cu_q[-1], 2, 64), np.float32).astype(np.float16)
        k = rng.standard_normal((cu_k[-1], 1, 64), np.float32).astype(np.float16)
        options: dict[str, Any] = {"precision": "fp8", "return_lse": True}
        for causal in (False, True):
            expected = attention_varlen(q, k, k, cu_q, cu_k, causal=causal, **options)
            there = [on_gpu(x) for x in (q, k, k, cu_q, cu_k)]
            found = attention_varlen(*there, causal=causal, **options)
            assert_agrees(found[0].get(), expected[0])
            assert_same(found[1].get(), expected[1])


@runs
def test_calls_with_other_scales_are_prepared_again(rng: np.random.Generator) -> None:
    """Shapes are the same: granularity, blocks and factors of scores are not."""
    arrays = drawn(rng, "float16", (1, 2, 2, 100, 300), 64, 64)
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"granularity": "head"}, {}),
        ({"block": 256}, {"scale": 0.5}),
        ({"granularity": "tensor"}, {"causal": True}),
        ({}, {"scale": 0.5, "sinks": np.array([1.0, 2], np.float32)}),
    ]
    first: list[Any] = []
    for repeat in range(2):
        for i, (how, options) in enumerate(ways):
            there = (cufa.quantize(on_gpu(x), **how) for x in arrays)
            given = {name: on_gpu(x) if name == "sinks" else x for name, x in options.items()}
            out = attention(*there, out_dtype=np.float16, **given).get()
            if repeat:
                np.testing.assert_array_equal(out, first[i])
                continue
            first.append(out)
            here = (cufa.quantize(x, **how) for x in arrays)
            assert_agrees(out, attention(*here, out_dtype=np.float32, **options))


@runs
@pytest.mark.parametrize("d", [64, 256])
@exhaustive("fp8", but=lambda d: d == 64)
def test_offsets_that_mean_nothing_reach_nothing_outside(rng: np.random.Generator, d: int) -> None:
    """Arrays end where memory that may be read does."""
    q, k, v = (on_gpu(x) for x in ragged(rng, d))
    wild = [on_gpu(np.array(x, np.int32)) for x in ([2**31 - 1, -5, 300, 7], [400, 9, -3, 431])]
    for of_q, of_k in (wild, wild[::-1]):
        attention_varlen(q, k, v, of_q, of_k, precision="fp8", causal=True, return_lse=True)


@runs
def test_varlen_of_nothing(rng: np.random.Generator) -> None:
    q, k, v = (x[:10] for x in ragged(rng, 64))
    for queries, keys in (([0, 4, 10], [0, 0, 0]), ([0, 0, 0], [0, 4, 10]), ([0], [0])):
        given = [on_gpu(x[: n[-1]]) for x, n in ((q, queries), (k, keys), (v, keys))]
        out, lse = attention_varlen(
            *given, np.array(queries), np.array(keys), precision="fp8", return_lse=True
        )
        assert out.shape == (queries[-1], 4, 64)
        assert not out.get().any()
        assert (lse.get() == -np.inf).all()


@runs
def test_each_sequence_gives_the_bits_that_it_gives_alone(rng: np.random.Generator) -> None:
    q, k, v = ragged(rng, 64, "float16")
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    options: dict[str, Any] = {"precision": "fp8", "causal": True}
    out = attention_varlen(*map(on_gpu, (q, k, v)), OFFSETS_Q, OFFSETS_K, **options).get()
    for i in (2, 5):
        a, b = slice(*OFFSETS_Q[i : i + 2]), slice(*OFFSETS_K[i : i + 2])
        alone = attention(*(on_gpu(x.swapaxes(0, 1)[None]) for x in (q[a], k[b], v[b])), **options)
        np.testing.assert_array_equal(alone.get()[0].swapaxes(0, 1), out[a])


@runs
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_behind_a_length_changes_no_scale(rng: np.random.Generator, causal: bool) -> None:
    q, k, v = drawn(rng, "float16", (2, 2, 1, 70, 300), 64, 64)
    lengths = np.array([190, 300], np.int32)
    k[0, :, 190:], v[0, :, 190:] = 6e4, -6e4
    options: dict[str, Any] = {"precision": "fp8", "lengths_k": lengths, "causal": causal}
    expected, _ = oracle(q[:1], k[:1, :, :190], v[:1, :, :190], causal=causal)
    for xp in (np.asarray, on_gpu):
        found = attention(*map(xp, (q, k, v)), **options)
        assert_agrees((found if xp is np.asarray else found.get())[:1], expected, 0.08)


def test_quantized_that_the_kernel_cannot_take_are_refused(hopper: Gpu) -> None:
    x = ones(*X)
    x8 = cufa.quantize(x)
    for name, which in (("k", 1), ("v", 2)):
        given = [x8, x8, x8]
        given[which] = cufa.quantize(x, block=64)
        message = rf"{name} was quantized with block=64: fp8_wgmma takes blocks of 128 rows or more"
        with pytest.raises(ValueError, match=message):
            attention(*given, out_dtype=np.float16)
    attention(cufa.quantize(x, block=16), x8, x8, out_dtype=np.float16)
    mean = on_gpu(np.zeros((1, 2, 64), np.float32))
    smooth = dataclasses.replace(x8, mean=mean)
    with pytest.raises(
        ValueError, match="k was quantized with smooth=True: fp8_wgmma adds no mean"
    ):
        attention(x8, smooth, x8, out_dtype=np.float16)
    with pytest.raises(TypeError, match="k is a numpy array, but q is a cupy array"):
        attention(x8, cufa.quantize(x.get()), x8, out_dtype=np.float16)
    with pytest.raises(TypeError, match="k is of type Array, but q is Quantized"):
        attention(x8, x, x8, out_dtype=np.float16)
    with pytest.raises(ValueError, match="k was quantized with hadamard=True, seed=0, but q with"):
        attention(x8, cufa.quantize(x, hadamard=True), x8, out_dtype=np.float16)
    with pytest.raises(ValueError, match="out_dtype is needed with arrays of 8 bits"):
        attention(x8, x8, x8)
    hopper.current = 1
    with pytest.raises(ValueError, match=r"q .* is on device 0, but the current device is 1"):
        attention(x8, x8, x8, out_dtype=np.float16)


def test_out_is_apart_from_8_bits() -> None:
    x8 = cufa.quantize(ones(1, 2, 100, 128))
    same = x8.values.view_of(x8.values.host.view(np.float16).reshape(1, 2, 50, 128))
    short = cufa.quantize(ones(1, 2, 50, 128))
    with pytest.raises(ValueError, match=r"out .* shares memory with k"):
        attention(short, x8, x8, out_dtype=np.float16, out=same)
    few = cufa.quantize(ones(1, 1, 2, 1))
    same = few.scales.view_of(few.scales.host.view(np.float16).reshape(1, 1, 2, 1))
    with pytest.raises(ValueError, match=r"out .* shares memory with q.scales"):
        attention(few, few, few, out_dtype=np.float16, out=same)


def test_captures_take_no_memory_of_their_own(hopper: Gpu) -> None:
    x = ones(*X)
    x8, v8 = cufa.quantize(x), cufa.quantize(x, transposed=True)
    hopper.stream = Stream(capturing=True)
    for name, arrays, options in (
        ("precision: q, k and v would be quantized", (x, x, x), {"precision": "fp8"}),
        ("v: it would be transposed", (x8, x8, x8), {"out_dtype": np.float16}),
        ("scale: it is -1.0", (x8, x8, v8), {"out_dtype": np.float16, "scale": -1.0}),
    ):
        with pytest.raises(ValueError, match=name):
            attention(*arrays, **options)
    with pytest.raises(ValueError, match="x would be copied"):
        cufa.quantize(ones(200, 65))
    with pytest.raises(ValueError, match="block=256 needs memory of its own"):
        cufa.quantize(x, block=256)
    with pytest.raises(ValueError, match="granularity='head' needs memory of its own"):
        cufa.quantize(x, granularity="head")
    attention(x8, cufa.quantize(x), v8, out_dtype=np.float16)
    assert [each.kernel for each in hopper.launches[-2:]] == ["quantize", "fp8_wgmma"]


@runs
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@exhaustive("fp8")
def test_a_call_like_an_earlier_one(hopper: Gpu, rng: np.random.Generator, layout: Any) -> None:
    """It computes with its own arrays."""
    options: dict[str, Any] = {"causal": True, "return_lse": True, "layout": layout}
    for _ in range(2):
        arrays = [*drawn(rng, "float16", (2, 4, 2, 70, 130), 64, 64)]
        if layout == "bshd":
            arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
        q, k, v = there = [on_gpu(x) for x in arrays]
        expected, expected_lse = attention(*arrays, precision="fp8", **options)
        eights = cufa.quantize_qkv(q, k, v, layout=layout)
        for out, lse in (
            attention(*there, precision="fp8", **options),
            attention(*eights, out_dtype=np.float16, **options),
        ):
            assert_agrees(out.get(), expected)
            assert_same(lse.get(), expected_lse)
    assert hopper.parsed == 4  # two on the CPU
