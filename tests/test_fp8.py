"""Attention of arrays in 8 bits on the CPU: its arithmetic, its features, what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference import DTYPES, oracle, random_inputs

import cufa
from cufa.cpu.softmax import round_weights

E4M3 = ml_dtypes.float8_e4m3fn
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
Quantized3 = tuple[cufa.Quantized, cufa.Quantized, cufa.Quantized]


def quantized(arrays: Arrays, *, hadamard: bool = True, **options: Any) -> Quantized3:
    q, k, v = arrays
    both = {"hadamard": hadamard, **options}
    return cufa.quantize(q, **both), cufa.quantize(k, **both), cufa.quantize(v, **options)


def back(arrays: Quantized3) -> Arrays:
    """Return the arrays that three stand for, in float32, whatever they were made from."""
    wide = (dataclasses.replace(x, dtype=np.dtype(np.float32)) for x in arrays)
    q, k, v = (x.dequantize() for x in wide)
    return q, k, v


def assert_close(
    out: np.ndarray, lse: np.ndarray, arrays: Quantized3, expected: Any = oracle, **options: Any
) -> None:
    """Compare with attention of the same 8 bits in float64: only weights are rounded again."""
    q, k, v = back(arrays)
    expected_out, expected_lse = expected(q, k, v, **options)
    magnitude, _ = expected(q, k, np.abs(v), **options)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=2e-4)
    largest = np.abs(v).max(initial=0)
    least = 2.0**-18 * k.shape[-2] * largest  # what is lost below the least weight
    difference = np.abs(out - expected_out)
    assert (difference <= 2.0**-4 * magnitude + least + 1e-5).all()
    assert np.sqrt((difference**2).mean()) <= 0.02 * largest


def test_weights_are_rounded_as_e4m3_is() -> None:
    bits = np.arange(0, 0x79, dtype=np.uint8)  # 0 to 256
    numbers = bits.view(E4M3).astype(np.float32) / 256
    halves = (numbers[:-1] + numbers[1:]) / 2
    x = np.concatenate([numbers, halves])
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(1))])
    x = np.minimum(x, np.float32(1))
    expected = (x * 256).astype(E4M3).astype(np.float32) / 256
    round_weights(x)
    assert np.array_equal(x, expected)


def test_the_arithmetic_of_one_tile(rng: np.random.Generator) -> None:
    arrays = quantized(random_inputs(rng, "float32", hq=2, sq=30, sk=200, d=64, dv=40))
    q, k, v = (x.stored() for x in arrays)
    scores = (q @ k.swapaxes(-1, -2) * np.float32(0.125)).astype(np.float32)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    rounded = (weights * 256).astype(E4M3).astype(np.float32) / 256
    total = weights.sum(axis=-1, keepdims=True)
    out = cufa.attention(*arrays, out_dtype=np.float32)
    # A weight next to the middle of two numbers may go either way: few do.
    difference = np.abs(out - rounded @ v[..., :40] / total)
    assert np.median(difference) < 1e-7
    assert difference.max() < 2e-3


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
@pytest.mark.parametrize("d", [1, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("hadamard", [False, True])
def test_head_dims(rng: np.random.Generator, d: int, granularity: Any, hadamard: bool) -> None:
    arrays = random_inputs(rng, "float16", b=2, hq=4, hk=2, sq=37, sk=301, d=d, dv=max(1, d - 3))
    its = quantized(arrays, hadamard=hadamard, granularity=granularity)
    out, lse = cufa.attention(*its, out_dtype=np.float32, return_lse=True)
    assert_close(out, lse, its)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "top-left"},
        {"window": (40, 3)},
        {"causal": True, "attention_chunk": 100},
        {"softcap": 2.0, "causal": True},
        {"scale": -0.3},
        {"scale": 0.0},
        {"sinks": np.array([0.5, -3, 8, 1], np.float32)},
        {"alibi_slopes": np.array([0.5, 0.1, 0.03, 0.0], np.float32)},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("smooth", [False, True])
def test_features(rng: np.random.Generator, options: dict[str, Any], smooth: bool) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=4, hk=2, sq=300, sk=600, d=64)
    k8 = cufa.quantize(k, hadamard=True, smooth=smooth)
    its = cufa.quantize(q, hadamard=True), k8, cufa.quantize(v)
    out, lse = cufa.attention(*its, out_dtype=np.float32, return_lse=True, **options)
    assert_close(out, lse, its, **options)


def test_masks_and_functions(rng: np.random.Generator) -> None:
    arrays = random_inputs(rng, "float32", b=2, hq=4, hk=2, sq=70, sk=90, d=64)
    its = quantized(arrays)
    mask, bias = rng.random((70, 90)) < 0.5, rng.standard_normal((2, 1, 70, 90), np.float32)

    def far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return abs(q_idx - kv_idx) > 9

    def less(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * 0.5

    options: dict[str, Any] = {"mask": mask[None, None], "bias": bias}
    found = cufa.attention(
        *its, **options, mask_mod=far, score_mod=less, out_dtype="float32", return_lse=True
    )
    expected = cufa.attention(*back(its), **options, mask_mod=far, score_mod=less, return_lse=True)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=0.05)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5)


def first_rows(x: cufa.Quantized, i: int, n: int) -> cufa.Quantized:
    """Return those of one sequence."""
    one = slice(i, i + 1)
    return dataclasses.replace(
        x,
        values=x.values[one, :, :n],
        scales=x.scales[one, :, : -(-n // 128)],
        shape=(1, x.shape[1], int(n), x.shape[3]),
    )


def test_lengths(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float16", b=3, hq=4, hk=2, sq=150, sk=200, d=64)
    lengths_q, lengths_k = np.array([150, 3, 0]), np.array([200, 140, 7])
    for x, numbers in ((q, lengths_q), (k, lengths_k), (v, lengths_k)):
        for i, n in enumerate(numbers):
            x[i, :, n:] = np.nan
    its = quantized((q, k, v))
    lengths: dict[str, Any] = {"lengths_q": lengths_q, "lengths_k": lengths_k}
    out, lse = cufa.attention(*its, **lengths, out_dtype=np.float32, causal=True, return_lse=True)
    for i, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        assert not out[i, :, n:].any()
        assert (lse[i, :, n:] == -math.inf).all()
        alone = (first_rows(x, i, size) for x, size in zip(its, (n, m, m), strict=True))
        expected = cufa.attention(*alone, out_dtype=np.float32, causal=True)
        np.testing.assert_allclose(out[i, :, :n], expected[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("smooth", [False, True])
def test_varlen(rng: np.random.Generator, smooth: bool) -> None:
    q, k = (rng.standard_normal((160, heads, 80), np.float32) for heads in (4, 2))
    offsets = np.array([0, 7, 127, 160], np.int32)
    q8 = cufa.quantize(q, layout="thd", hadamard=True)
    k8 = cufa.quantize(k, layout="thd", hadamard=True, smooth=smooth)
    v8 = cufa.quantize(k, layout="thd")
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    out, lse = cufa.attention_varlen(
        q8, k8, v8, offsets, offsets, out_dtype=ml_dtypes.bfloat16, **options
    )
    assert out.dtype == ml_dtypes.bfloat16
    assert out.shape == q.shape
    plain = back((q8, k8, v8))
    expected, expected_lse = cufa.attention_varlen(*plain, offsets, offsets, **options)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=0.1)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-5)


def test_precision_gives_sequences_blocks_of_their_own(rng: np.random.Generator) -> None:
    """Nothing of a sequence reaches another: not even its scales."""
    q, k = (rng.standard_normal((160, heads, 80), np.float32) for heads in (4, 2))
    offsets = np.array([0, 7, 127, 160], np.int32)
    options: dict[str, Any] = {"precision": "fp8", "causal": True, "return_lse": True}
    out, lse = cufa.attention_varlen(q, k, k, offsets, offsets, **options)
    assert out.dtype == np.float32
    each: dict[str, Any] = {"layout": "thd", "cu_seqlens": offsets}
    q8, k8 = (cufa.quantize(x, hadamard=True, **each) for x in (q, k))
    v8 = cufa.quantize(k, **each)
    lengths = offsets, offsets
    same = cufa.attention_varlen(q8, k8, v8, *lengths, out_dtype="float32", causal=True)
    assert np.array_equal(same, out)
    for first, end in itertools.pairwise(offsets):
        one = (x[first:end].swapaxes(0, 1)[None] for x in (q, k, k))
        alone, its_lse = cufa.attention(*one, **options)
        np.testing.assert_allclose(alone[0].swapaxes(0, 1), out[first:end], rtol=0, atol=1e-6)
        np.testing.assert_allclose(its_lse[0], lse[:, first:end], rtol=0, atol=1e-6)
    used = np.array([7, 60, 33])
    k[67:127] = 1e9
    found = cufa.attention_varlen(q, k, k, offsets, offsets, seqused_k=used, **options)
    k[67:127] = np.nan
    same = cufa.attention_varlen(q, k, k, offsets, offsets, seqused_k=used, **options)
    assert np.array_equal(found[0], same[0])


def test_sequences_must_be_those_of_the_call() -> None:
    x, offsets = np.ones((40, 2, 64), np.float16), np.array([0, 30, 40])
    x8 = cufa.quantize(x, layout="thd", cu_seqlens=offsets)
    with pytest.raises(ValueError, match="k was quantized with other cu_seqlens than the call's"):
        cufa.attention_varlen(x8, x8, x8, offsets, np.array([0, 20, 40]), out_dtype=np.float16)


def test_what_is_behind_a_length_changes_no_scale(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", b=2, sq=30, sk=40, d=64)
    options: dict[str, Any] = {"precision": "fp8", "lengths_k": np.array([40, 9])}
    options["lengths_q"] = np.array([30, 5])
    expected = cufa.attention(q, k, v, **options)
    q[1, :, 5:], k[1, :, 9:], v[1, :, 9:] = 1e30, 1e30, -1e30
    k[1, :, 20:] = np.nan
    assert np.array_equal(cufa.attention(q, k, v, **options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "layout"), [((2, 4, 50, 64), "bhsd"), ((2, 50, 4, 64), "bshd")])
def test_precision_quantizes_first(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...], layout: Any
) -> None:
    q, k, v = (rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]) for _ in range(3))
    options: dict[str, Any] = {"causal": True, "layout": layout}
    found = cufa.attention(q, k, v, precision="fp8", **options)
    q8, k8 = (cufa.quantize(x, hadamard=True, layout=layout) for x in (q, k))
    v8 = cufa.quantize(v, layout=layout)
    expected = cufa.attention(q8, k8, v8, out_dtype=q.dtype, **options)
    assert found.dtype == q.dtype
    assert np.array_equal(found, expected)
    columns = cufa.quantize(v, layout=layout, transposed=True)
    found = cufa.attention(q8, k8, columns, out_dtype=q.dtype, **options)
    assert np.array_equal(found, expected)
    wide = cufa.attention(q, k, v, precision="fp8", out_dtype=np.float32, **options)
    assert np.array_equal(wide.astype(q.dtype), found)
    cufa.attention(q, k, v, precision="fp8", out=q, **options)  # it is quantized before
    assert np.array_equal(q, found)


def test_fewer_axes(rng: np.random.Generator) -> None:
    x = rng.standard_normal((50, 64), np.float32)
    x8, x8_v = cufa.quantize(x), cufa.quantize(x)
    bias = rng.standard_normal((50, 50), np.float32)
    out, lse = cufa.attention(x8, x8, x8_v, bias=bias, out_dtype=np.float32, return_lse=True)
    assert out.shape == (50, 64)
    assert lse.shape == (50,)
    with_batch = cufa.quantize(x[None])
    same = cufa.attention(with_batch, with_batch, with_batch, bias=bias[None], out_dtype="float32")
    assert np.array_equal(same[0], out)


def test_keys_that_none_sees_may_be_nan(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", sq=300, d=64)
    k[0, 0, 200], v[0, 0, 200] = np.nan, np.inf
    out = cufa.attention(q, k, v, precision="fp8", causal=True)
    assert np.isfinite(out[0, 0, :200]).all()
    assert np.isnan(out[0, 0, 200:]).all()


def test_rows_without_keys_and_empty_arrays() -> None:
    q = np.ones((1, 2, 5, 64), np.float16)
    k = np.ones((1, 2, 3, 64), np.float16)
    out, lse = cufa.attention(q, k, k, precision="fp8", causal=True, return_lse=True)
    assert np.array_equal(out[..., 0], [[[0, 0, 1, 1, 1]] * 2])
    assert (lse[..., :2] == -math.inf).all()
    for sq, sk in ((0, 3), (5, 0), (0, 0)):
        out = cufa.attention(q[:, :, :sq], k[:, :, :sk], k[:, :, :sk], precision="fp8")
        assert out.shape == (1, 2, sq, 64)
        assert not out.any() or sk


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 0, 5, 64), (2, 2, 0, 64)])
def test_empty_arrays_with_a_mean(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float16)
    x8, k8 = cufa.quantize(x), cufa.quantize(x, smooth=True)
    out, lse = cufa.attention(x8, k8, x8, out_dtype=np.float32, return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:-1]


def test_explain_says_the_plan(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float16", sq=50, d=64)
    plan = cufa.explain(*quantized((q, k, v)), out_dtype=np.float16)
    assert plan == cufa.explain(q, k, v, precision="fp8") == cufa.explain(q, k, v)


X = np.zeros((1, 2, 40, 64), np.float16)
X8, H8 = cufa.quantize(X), cufa.quantize(X, hadamard=True)
OUT: dict[str, Any] = {"out_dtype": np.float16}


@pytest.mark.parametrize(
    ("arrays", "options", "kind", "message"),
    [
        ((X8, X8, X8), {}, ValueError, "out_dtype is needed"),
        ((X, X, X), OUT, ValueError, "out_dtype must be None, unless"),
        ((X8, X8, X8), {"out_dtype": np.float64}, TypeError, "out_dtype must be float16"),
        ((X8, X8, X8), {"out_dtype": "half an hour"}, TypeError, "out_dtype must be float16"),
        ((X8, X8, X8), {"out_dtype": np.int8}, TypeError, "out_dtype must be float16"),
        ((X8, X8, X8), {"out_dtype": np.zeros(2)}, TypeError, "out_dtype must be float16"),
        ((X8, X8, X8), {"out_dtype": "(2"}, TypeError, "out_dtype must be float16"),
        ((X8, X, X8), OUT, TypeError, r"k is of type ndarray, but q is Quantized.*quantize\(k\)"),
        ((X, X8, X8), {}, TypeError, "q is of type ndarray, but k is Quantized"),
        ((X, X, X8), {"precision": "fp8"}, TypeError, "q is of type ndarray, but v is"),
        ((X8, H8, X8), OUT, ValueError, "k was quantized with hadamard=True, seed=0, but q with"),
        (
            (H8, cufa.quantize(X, hadamard=True, seed=1), X8),
            *(OUT, ValueError, "k was quantized with hadamard=True, seed=1, but q .* seed=0"),
        ),
        ((H8, H8, H8), OUT, ValueError, "v was quantized with hadamard=True"),
        ((X8, cufa.quantize(X, transposed=True), X8), OUT, ValueError, "k was .* transposed=True"),
        ((cufa.quantize(X, smooth=True), X8, X8), OUT, ValueError, "q was .* smooth=True"),
        ((X8, X8, cufa.quantize(X, smooth=True)), OUT, ValueError, "v was .* smooth=True"),
        ((X8, X8, X8), {**OUT, "layout": "bshd"}, ValueError, "q was quantized with layout='bhsd'"),
        ((X8, X8, X8), {**OUT, "layout": "sbhd"}, ValueError, "layout must be 'bhsd', 'bshd' or"),
        ((X8, X8, X8), {**OUT, "layout": np.zeros(2)}, TypeError, "layout must be a string"),
        ((X8, cufa.quantize(X[..., :63]), X8), OUT, ValueError, "k has shape.*head_dim 63 and 64"),
        ((X8, X8, cufa.quantize(X[:, :, :9])), OUT, ValueError, "v has shape.*seq 9 and 40"),
        ((X8, X8, X8), {**OUT, "kernel": "fa2_mma"}, ValueError, "kernel must be None"),
        ((X8, X8, X8), {**OUT, "out": X.astype(np.float32)}, TypeError, "out has dtype float32"),
        ((X8, X8, X8), {**OUT, "out": X[..., :5]}, ValueError, "out has shape"),
        ((X8, X8, X8), {**OUT, "out": [1.0]}, TypeError, "out must be a NumPy"),
        ((X, X, X), {"precision": "fp4"}, ValueError, "precision must be 'fp8' or None"),
        ((X, X, X), {"precision": 8}, TypeError, "precision must be 'fp8' or None"),
        ((X, X.astype(np.float32), X), {"precision": "fp8"}, TypeError, "k has dtype float32"),
        ((X, X, [1.0]), {"precision": "fp8"}, TypeError, "v must be a NumPy or a CuPy array"),
        ((np.zeros((4, 300), np.float16),) * 3, {"precision": "fp8"}, ValueError, "q has shape"),
    ],
)
@pytest.mark.parametrize("call", [cufa.attention, cufa.explain])
def test_errors_name_the_argument(
    call: Any, arrays: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call(*arrays, **options)


def test_varlen_takes_arrays_of_its_own_layout() -> None:
    x8 = cufa.quantize(np.zeros((40, 2, 64), np.float16))
    offsets = np.array([0, 40])
    with pytest.raises(ValueError, match="q was quantized with layout='bhsd', not 'thd'"):
        cufa.attention_varlen(x8, x8, x8, offsets, offsets, out_dtype=np.float16)


def test_others_take_no_arrays_of_8_bits() -> None:
    dout: Any = X8
    with pytest.raises(TypeError, match=r"dout must be .* Quantized: dout.dequantize\(\) is one"):
        cufa.attention_backward(dout, X, X, X, X, X)
