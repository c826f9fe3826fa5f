"""Attention in 8 bits on Hopper: the grid of its features, hard data, captures."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, oracle, random_inputs
from remembered8 import assert_packed_calls_agree

import cufa

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

#: Relative to the root mean square of the result: the rounding of P to four bits makes an error of
#: 0.028 of it (in NumPy, 300 to 2049 keys), and two results that round P at other maxima differ by
#: 0.040.
RMSE = 0.045
LSE_ERROR = 0.02

HEAD_DIMS = [(64, 64), (96, 96), (100, 99), (128, 128), (192, 128), (192, 192), (256, 256), (40, 8)]
#: Query heads, K/V heads, queries and keys.
SIZES = [
    *((2, 2, 1, 1), (4, 2, 129, 1), (4, 1, 333, 300), (2, 2, 64, 128)),
    *((8, 2, 1, 1000), (2, 1, 1025, 2049)),
]
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (70, 9)},
    "causal window": {"causal": True, "window": (300, None)},
    "chunk": {"attention_chunk": 100, "causal": True},
    "softcap": {"softcap": 2.0, "causal": True},
    "softcap of small scores": {"softcap": 30.0},
    "dropout": {"dropout_p": 0.25, "seed": 3},
    "scale": {"scale": -0.1},
}

attention: Any = cufa.attention


def poisoned(array: Any, x: np.ndarray) -> tuple[Any, Any]:
    """Return memory of NaN, and a view of it that holds x; heads follow each other in a row."""
    b, h, s, d = x.shape
    whole = np.full((b, s + 3, h + 1, d + 16), np.nan, np.float32).astype(x.dtype)
    whole.transpose(0, 2, 1, 3)[:, :h, :s, 8 : d + 8] = x
    there = array(whole)
    return there, there.transpose(0, 2, 1, 3)[:, :h, :s, 8 : d + 8]


def assert_agrees(found: Any, expected: np.ndarray, error: float = RMSE) -> None:
    out, expected = found.get().astype(np.float64), expected.astype(np.float64)
    assert np.isfinite(out).all()
    size = np.sqrt((expected**2).mean())
    assert np.sqrt(((out - expected) ** 2).mean()) <= error * size


def assert_same(found: Any, expected: np.ndarray) -> None:
    lse = found.get()
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected))
    seen = ~np.isneginf(expected)
    np.testing.assert_allclose(lse[seen], expected[seen], rtol=0, atol=LSE_ERROR)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
def test_grid(
    rng: np.random.Generator, cupy: Any, d: int, dv: int, sizes: Any, feature: str
) -> None:
    """The result is that of NumPy arrays, which have the same bytes."""
    hq, hk, sq, sk = sizes
    dtype = "float16" if d == 128 else "bfloat16"
    arrays = random_inputs(rng, dtype, b=2, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
    options = {**FEATURES[feature], "precision": "fp8"}
    expected, expected_lse = attention(*arrays, return_lse=True, **options)
    given = [poisoned(cupy.asarray, x)[1] for x in arrays]
    whole, out = poisoned(cupy.asarray, np.full_like(expected, np.nan))
    _, lse = attention(*given, return_lse=True, out=out, **options)
    assert_agrees(out, expected)
    assert_same(lse, expected_lse)
    # Nothing is written next to it.
    assert np.isfinite(whole.get().astype(np.float32)).sum() == out.size
    assert_agrees(attention(*given, **options), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
def test_lengths(rng: np.random.Generator, cupy: Any, d: int, dv: int, causal: bool) -> None:
    """NaN lies behind the lengths."""
    q, k, v = random_inputs(rng, "bfloat16", b=6, hq=4, hk=2, sq=333, sk=700, d=d, dv=dv)
    lengths_q, lengths_k = np.array([333, 0, 1, 100, 333, 200]), np.array([700, 5, 0, 129, 513, 64])
    how: dict[str, Any] = {"precision": "fp8", "causal": causal, "return_lse": True}
    for options in ({"lengths_q": lengths_q}, {"lengths_k": lengths_k, "lengths_q": lengths_q}):
        for i in range(6):
            q[i, :, lengths_q[i] :] = np.nan
            if "lengths_k" in options:
                k[i, :, lengths_k[i] :] = v[i, :, lengths_k[i] :] = np.nan
        expected, expected_lse = attention(q, k, v, **options, **how)
        there = {name: cupy.asarray(x, np.int32) for name, x in options.items()}
        arrays = [cupy.asarray(x) for x in (q, k, v)]
        out, lse = attention(*arrays, **there, **how)
        assert_agrees(out, expected)
        assert_same(lse, expected_lse)
        q8, k8 = (cufa.quantize(x, hadamard=True) for x in arrays[:2])
        in_8_bits = {**how, "precision": None, "out_dtype": q.dtype}  # NaN is in the bytes
        out, lse = attention(q8, k8, cufa.quantize(arrays[2]), **there, **in_8_bits)
        assert_agrees(out, expected)
        assert_same(lse, expected_lse)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_arrays_next_to_q_k_and_v(rng: np.random.Generator, cupy: Any, d: int) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=4, hk=2, sq=500, sk=700, d=d)
    for name, x in (
        ("sinks", rng.standard_normal(4).astype(np.float32)),
        ("alibi_slopes", np.array([0.5, 0.1, 0.02, 0.3], np.float32)),
    ):
        how: dict[str, Any] = {"precision": "fp8", "causal": True, "return_lse": True}
        expected, expected_lse = attention(q, k, v, **{name: x}, **how)
        out, lse = attention(*map(cupy.asarray, (q, k, v)), **{name: cupy.asarray(x)}, **how)
        assert_agrees(out, expected)
        assert_same(lse, expected_lse)


@pytest.mark.parametrize("d", [64, 100, 128, 192, 256])
@pytest.mark.parametrize(
    "how",
    [{"granularity": "head"}, {"granularity": "tensor"}, {"block": 1024}, {"hadamard": True}],
    ids=str,
)
def test_quantized(rng: np.random.Generator, cupy: Any, d: int, how: Any) -> None:
    arrays = random_inputs(rng, "float32", b=2, hq=4, hk=2, sq=333, sk=500, d=d)
    of_v = {name: x for name, x in how.items() if name != "hadamard"}
    q8, k8, v8 = (
        cufa.quantize(cupy.asarray(x), **its)
        for x, its in zip(arrays, (how, how, of_v), strict=True)
    )
    for x8, x, most in zip((q8, k8, v8), arrays, (0.04, 0.04, 0.04), strict=True):
        error = x8.dequantize().get() - x
        assert np.sqrt((error**2).mean()) <= most
    expected, _ = oracle(*(x8.dequantize().get() for x8 in (q8, k8, v8)))
    out = attention(q8, k8, v8, out_dtype=np.float16)
    assert_agrees(out, expected, 0.03)
    turned = cufa.quantize(cupy.asarray(arrays[2]), transposed=True, **of_v)
    same = attention(q8, k8, turned, out_dtype=np.float16)
    np.testing.assert_array_equal(same.get(), out.get())


@pytest.mark.parametrize(("d", "most"), [(64, 1.4e-2), (128, 9.1e-3), (256, 6.5e-3)])
def test_outliers(rng: np.random.Generator, cupy: Any, d: int, most: float) -> None:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001) (Shah et al. 2024, section 4.3)."""

    def drawn() -> np.ndarray:
        rare = rng.random((2, 4, 1024, d)) < 0.001
        found = rng.standard_normal(rare.shape) + 10 * rng.standard_normal(rare.shape) * rare
        return found.astype(np.float32)

    q, k, v = drawn(), drawn(), drawn()
    expected, _ = oracle(q, k, v)
    out = attention(*map(cupy.asarray, (q, k, v)), precision="fp8", out_dtype=np.float16)
    assert np.sqrt(((out.get().astype(np.float64) - expected) ** 2).mean()) <= most


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_error_does_not_grow_with_the_length(
    rng: np.random.Generator, cupy: Any, d: int
) -> None:
    errors = []
    for n in (1 << 10, 1 << 13, 1 << 15, 1 << 17):
        q, k, v = random_inputs(rng, "float32", sq=64, sk=n, d=d)
        expected, _ = oracle(q, k, v)
        out = attention(*map(cupy.asarray, (q, k, v)), precision="fp8", out_dtype=np.float16)
        error = np.sqrt(((out.get() - expected) ** 2).mean())
        errors.append(error / np.sqrt((expected**2).mean()))
    assert max(errors) <= 1.3 * errors[0]


def test_needles_are_found(rng: np.random.Generator, cupy: Any) -> None:
    """Each of 200 queries has a key of its own, of 131072, whose score stands out by 5."""
    n, d, draws = 1 << 17, 64, 200
    q, k, v = random_inputs(rng, "float32", sq=draws, sk=n, d=d)
    at = rng.choice(n, draws, replace=False)
    k[0, 0, at] = 0
    others = (q[0, 0] @ k[0, 0].T).max(axis=-1, keepdims=True) / 8
    k[0, 0, at] = q[0, 0] * (others + 5) * 8 / (q[0, 0] ** 2).sum(axis=-1, keepdims=True)
    out = attention(*map(cupy.asarray, (q, k, v)), precision="fp8", out_dtype=np.float16)
    found = out.get()[0, 0].astype(np.float32)
    assert np.array_equal((found @ v[0, 0].T).argmax(axis=-1), at)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_same_bits_in_any_batch_and_again(
    rng: np.random.Generator, cupy: Any, dtype: str
) -> None:
    q, k, v = (
        cupy.asarray(x) for x in random_inputs(rng, dtype, b=40, hq=8, hk=2, sq=700, sk=900, d=128)
    )
    out = attention(q, k, v, precision="fp8", causal=True)
    assert out.dtype == DTYPES[dtype]
    for _ in range(5):
        again = attention(q, k, v, precision="fp8", causal=True)
        np.testing.assert_array_equal(again.get(), out.get())
    alone = attention(q[7:8], k[7:8], v[7:8], precision="fp8", causal=True)
    np.testing.assert_array_equal(alone.get(), out[7:8].get())


def test_graphs(rng: np.random.Generator, cupy: Any) -> None:
    arrays = [cupy.asarray(x) for x in random_inputs(rng, "float16", b=2, hq=4, sq=500, d=128)]
    stream = cupy.cuda.Stream(non_blocking=True)
    held: list[cufa.Quantized] = []

    def call() -> Any:
        q, k, v = arrays
        eights = (cufa.quantize(q, hadamard=True), cufa.quantize(k, hadamard=True))
        held[:] = [*eights, cufa.quantize(v, transposed=True)]
        return attention(*held, out_dtype=np.float16, causal=True, return_lse=True)

    with stream:
        call(), call()  # now there is memory for another one
        held.clear()
        stream.synchronize()
        stream.begin_capture()
        out, lse = call()
        graph = stream.end_capture()
    for x in arrays:
        x[...] = cupy.asarray(rng.standard_normal(x.shape).astype(np.float16))
    out.fill(np.nan)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    same, same_lse = attention(*arrays, precision="fp8", causal=True, return_lse=True)
    np.testing.assert_array_equal(out.get(), same.get())
    np.testing.assert_array_equal(lse.get(), same_lse.get())


#: Queries and keys of each sequence.
RAGGED = (
    ((5, 0, 130, 40, 1, 200, 700), (7, 3, 130, 90, 0, 201, 900)),
    ((333,) * 9, (128,) * 9),
    ((1,) * 40, tuple(range(40))),
    ((2000,), (3000,)),
)
attention_varlen: Any = cufa.attention_varlen


def ragged(rng: np.random.Generator, lengths: Any, d: int, dv: int) -> tuple[Any, ...]:
    """Draw q, k and v, of which each sequence has its own magnitude, and offsets."""
    queries, keys = lengths
    sizes = (sum(queries), 4, d), (sum(keys), 2, d), (sum(keys), 2, dv)
    q, k, v = (rng.standard_normal(each, np.float32) for each in sizes)
    v *= 10.0 ** (np.arange(len(keys)) % 3).repeat(keys)[:, None, None].astype(np.float32)
    offsets = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in lengths)
    return (*(x.astype(DTYPES["bfloat16"]) for x in (q, k, v)), *offsets)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"causal": True}, {"window": (70, 9)}, {"softcap": 2.0, "causal": "top-left"}),
        *({"scale": -0.1}, {"scale": 0.0, "causal": True}, {"dropout_p": 0.25, "seed": 3}),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", RAGGED, ids=lambda lengths: str(lengths)[:30])
@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
def test_varlen(
    rng: np.random.Generator, cupy: Any, d: int, dv: int, lengths: Any, options: Any
) -> None:
    """Rows behind the last sequence, and keys that are not in use, are NaN."""
    q, k, v, *offsets = ragged(rng, lengths, d, dv)
    used = np.array([n - n // 5 for n in lengths[1]], np.int32)
    for first, end, n in zip(offsets[1][:-1], offsets[1][1:], used, strict=True):
        k[first + n : end] = v[first + n : end] = np.nan
    how: dict[str, Any] = {"precision": "fp8", "return_lse": True, **options}
    expected, expected_lse = attention_varlen(q, k, v, *offsets, seqused_k=used, **how)
    given = [np.concatenate([x, np.full_like(x[:1], np.nan)]) for x in (q, k, v)]
    there = [cupy.asarray(x) for x in (*given, *offsets)]
    out, lse = attention_varlen(*there, seqused_k=cupy.asarray(used), **how)
    assert not out[len(q) :].any()
    assert_same(lse[:, : len(q)], expected_lse)
    found, wide = out.get()[: len(q)].astype(np.float64), expected.astype(np.float64)
    errors = []  # relative to each sequence's magnitude
    for first, end in itertools.pairwise(offsets[0]):
        size = np.sqrt((wide[first:end] ** 2).mean()) if wide[first:end].any() else 1
        errors.append((found[first:end] - wide[first:end]).ravel() / size)
    assert np.sqrt((np.concatenate(errors) ** 2).mean()) <= RMSE
    again = attention_varlen(*there, seqused_k=cupy.asarray(used), **how)
    np.testing.assert_array_equal(again[0].get(), out.get())


@pytest.mark.parametrize("d", [64, 128, 256])
def test_varlen_of_quantized_in_a_graph(rng: np.random.Generator, cupy: Any, d: int) -> None:
    """The graph follows offsets that change on the device."""
    *arrays, offsets_q, offsets_k = ragged(rng, RAGGED[0], d, d)
    there = [cupy.asarray(x) for x in (*arrays, offsets_q, offsets_k)]
    stream = cupy.cuda.Stream(non_blocking=True)
    held: list[cufa.Quantized] = []

    def call() -> Any:
        q, k, v, of_q, of_k = there
        both: dict[str, Any] = {"layout": "thd", "hadamard": True}
        held[:] = [
            cufa.quantize(q, cu_seqlens=of_q, **both),
            cufa.quantize(k, cu_seqlens=of_k, **both),
            cufa.quantize(v, cu_seqlens=of_k, layout="thd", transposed=True),
        ]
        return attention_varlen(*held, of_q, of_k, out_dtype=np.float16, causal=True)

    with stream:
        call(), call()  # now there is memory for another one
        held.clear()
        stream.synchronize()
        stream.begin_capture()
        out = call()
        graph = stream.end_capture()
    offsets_q[1:-1] += 30
    offsets_k[1:-1] += 50
    there[3][...], there[4][...] = cupy.asarray(offsets_q), cupy.asarray(offsets_k)
    out.fill(np.nan)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    same = attention_varlen(*there, precision="fp8", out_dtype=np.float16, causal=True)
    np.testing.assert_array_equal(out.get(), same.get())


@pytest.mark.parametrize("d", [64, 128, 256])
def test_calls_like_another_read_their_own_arrays(
    rng: np.random.Generator, cupy: Any, monkeypatch: pytest.MonkeyPatch, d: int
) -> None:
    assert_packed_calls_agree(monkeypatch, rng, cupy.asarray, d, (700, 900))


def test_what_is_behind_a_length_changes_no_scale(rng: np.random.Generator, cupy: Any) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=4, hk=2, sq=333, sk=700, d=128)
    lengths = np.array([700, 190], np.int32)
    how: dict[str, Any] = {"precision": "fp8", "lengths_k": cupy.asarray(lengths)}
    k[1, :, 190:] = v[1, :, 190:] = 0
    expected = attention(*map(cupy.asarray, (q, k, v)), **how)
    k[1, :, 190:], v[1, :, 190:] = 1e30, -1e30
    found = attention(*map(cupy.asarray, (q, k, v)), **how)
    np.testing.assert_array_equal(found.get(), expected.get())


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_nan_are_nan(
    rng: np.random.Generator, cupy: Any, d: int, causal: bool
) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=1, hq=4, hk=2, sq=500, sk=700, d=d)
    q[0, 0, 70, 3], k[0, 1, 460, 5] = np.nan, np.inf
    how: dict[str, Any] = {"precision": "fp8", "causal": causal, "return_lse": True}
    found = [x.get() for x in attention(*map(cupy.asarray, (q, k, v)), **how)]
    for its, expected in zip(found, attention(q, k, v, **how), strict=True):
        np.testing.assert_array_equal(*(np.isnan(x.astype(np.float32)) for x in (its, expected)))


def test_products_of_scales_that_float32_does_not_hold(rng: np.random.Generator, cupy: Any) -> None:
    q, k, v = random_inputs(rng, "bfloat16", b=1, hq=2, sq=333, sk=300, d=128)
    tiny = q.dtype.type(1e-25)
    for arrays, scale in (((q * tiny, k * tiny, v), None), ((q, k, v), 0.0)):
        how: dict[str, Any] = {"precision": "fp8", "causal": True, "scale": scale}
        found = attention(*map(cupy.asarray, arrays), **how)
        assert_agrees(found, attention(*arrays, **how))
