"""decode on keys and values of 8 bits: the NumPy form, and what is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from eight_bits import E4M3, KINDS, Cache, in_pages8, poisoned8, quantized8
from reference import DTYPES, random_inputs
from test_decode import LENGTHS, assert_each_accepted

import cufa


def decode8(q: Any, k: Cache, v: Cache, **options: Any) -> Any:
    """Decode on caches of 8 bits."""
    return cufa.decode(q, k.values, v.values, k_scale=k.scales, v_scale=v.scales, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_lengths_that_differ(rng: np.random.Generator, layout: str, kind: str, dtype: str) -> None:
    """As attention in float64 over what bytes and scales stand for; NaN is in all else."""
    b, hk, hq, sq = len(LENGTHS), 2, 6, 3
    q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=350, d=40, dv=24)
    caches = quantized8(k, kind), quantized8(v, kind)
    k, v = (cache.numbers for cache in caches)
    lengths = np.array(LENGTHS)
    k8, v8 = (poisoned8(cache, LENGTHS) for cache in caches)
    out, lse = decode8(q, k8, v8, lengths=lengths, return_lse=True)
    assert_each_accepted(out, lse, q, k, v, LENGTHS, causal=True)
    seed = int(rng.integers(1 << 30))
    (paged_k, table), (paged_v, _) = (
        in_pages8(np.random.default_rng(seed), cache, LENGTHS, 16) for cache in caches
    )
    if layout == "bshd":
        q, paged_k, paged_v = q.swapaxes(1, 2), paged_k.turned(), paged_v.turned()
    options: dict[str, Any] = {"lengths": lengths, "block_table": table, "layout": layout}
    paged = decode8(q, paged_k, paged_v, **options)
    np.testing.assert_array_equal(paged.swapaxes(1, 2) if layout == "bshd" else paged, out)


@pytest.mark.parametrize("kind", KINDS)
def test_features(rng: np.random.Generator, kind: str) -> None:
    q, k, v = random_inputs(rng, "float32", b=2, hq=6, hk=3, sq=4, sk=200, d=32)
    caches = quantized8(k, kind), quantized8(v, kind)
    options: dict[str, Any] = {
        "window": (50, None),
        "softcap": 5.0,
        "alibi_slopes": rng.random(6, np.float32),
        "sinks": rng.standard_normal(6).astype(np.float32),
        "scale": -0.2,
    }
    lengths = np.array([200, 77])
    out, lse = decode8(q, *caches, lengths=lengths, return_lse=True, **options)
    k, v = (cache.numbers for cache in caches)
    assert_each_accepted(out, lse, q, k, v, lengths, causal=True, **options)


def test_scales_of_any_strides_and_read_only_memory(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", b=2, hq=4, hk=2, sq=1, sk=100, d=16)
    caches = quantized8(k, "int8"), quantized8(v, "int8")
    expected = decode8(q, *caches)
    strided = []
    for values, scales in caches:
        wide = np.full((*scales.shape, 3), np.nan, np.float32)
        wide[..., 1] = scales
        values.flags.writeable = wide.flags.writeable = False
        strided.append(Cache(values, wide[..., 1]))
    np.testing.assert_array_equal(decode8(q, *strided), expected)
    one = np.broadcast_to(np.float32(0.5), k.shape[:3])
    halves = (Cache(cache.values, one) for cache in caches)
    assert np.isfinite(decode8(q, *halves)).all()


def test_memory_does_not_grow_with_the_keys() -> None:
    """Tiles are expanded one after the other."""
    keys, d = 1 << 15, 64
    values = np.ones((1, 4, keys, d), np.int8)
    cache = Cache(values, np.ones((1, 4, keys), np.float32))
    q = np.ones((1, 4, 1, d), np.float32)
    decode8(q, cache, cache)
    tracemalloc.start()
    decode8(q, cache, cache)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.nbytes


def test_a_scale_of_zero_and_bytes_of_nan(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", b=1, hq=2, hk=1, sq=1, sk=90, d=16)
    k8, v8 = quantized8(k, "uint8"), quantized8(v, "uint8")
    k8.scales[:], v8.scales[..., 3:] = 0, 0
    out = decode8(q, k8, v8)
    np.testing.assert_allclose(out[0, 0, 0], v8.numbers[0, 0, :3].sum(axis=0) / 90, rtol=1e-5)
    v8.values[0, 0, 5, 7] = 0x7F
    out = decode8(q, k8, v8)
    assert np.isnan(out[..., 7]).all()
    assert np.isfinite(np.delete(out, 7, axis=-1)).all()


# --- what is refused ---

Q = np.zeros((2, 4, 1, 8), np.float32)
INTS = np.zeros((2, 2, 10, 8), np.int8)
BYTES = INTS.view(np.uint8)
FLOATS = INTS.view(E4M3)
ONES = np.ones((2, 2, 10), np.float32)
PAGES = np.zeros((5, 2, 4, 8), np.int8)
TABLE = np.array([[0, 1, 2], [3, 4, 0]])
HALVES = INTS.astype(np.float16)

BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        *("no scales", {"k_scale": None, "v_scale": None}, ValueError),
        r"k_scale is needed where k_cache has dtype int8: float32, .* k_cache\.shape\[:3\]; "
        r"scales\(\) of a KVCache returns them",
    ),
    ("no k_scale", {"k_scale": None}, ValueError, "k_scale is needed where k_cache has"),
    ("no v_scale", {"v_scale": None}, ValueError, "v_scale is needed where v_cache has"),
    (
        *("16 bits", {"q": Q.astype(np.float16), "k_cache": HALVES, "v_cache": HALVES}, ValueError),
        "k_scale must be None where k_cache has dtype float16: scales are for caches of 8 bits, "
        "float8_e4m3fn, uint8, int8",
    ),
    (
        *("one scale", {"k_cache": Q, "v_cache": Q, "k_scale": None}, ValueError),
        "v_scale must be None where k_cache has dtype float32",
    ),
    (
        *("V of 16 bits", {"v_cache": HALVES}, TypeError),
        "v_cache has dtype float16, but k_cache has dtype int8: caches of 8 bits must both",
    ),
    ("K of 16 bits", {"k_cache": HALVES}, TypeError, "v_cache has dtype int8, but k_cache"),
    ("both kinds", {"k_cache": FLOATS}, TypeError, "v_cache has dtype int8, but k_cache has dtype"),
    ("bytes", {"k_cache": FLOATS, "v_cache": BYTES}, TypeError, "v_cache has dtype uint8"),
    (
        *("e5m2", {name: INTS.view(ml_dtypes.float8_e5m2) for name in ("k_cache", "v_cache")}),
        *(ValueError, "k_scale must be None where k_cache has dtype float8_e5m2"),
    ),
    ("q", {"q": Q.astype(np.int8)}, TypeError, "q has dtype int8: one of float16"),
    ("out", {"out": np.zeros(Q.shape, np.float16)}, TypeError, "out has dtype float16"),
    (
        *("dtype", {"k_scale": ONES.astype(np.float64)}, TypeError),
        r"k_scale has dtype float64, but float32 is needed: k_scale\.astype\(numpy\.float32\)",
    ),
    (
        *("shape", {"v_scale": ONES[:, :, 1:]}, ValueError),
        r"v_scale has shape \(2, 2, 9\), but v_cache has shape .*, \(2, 2, 10\), is needed",
    ),
    ("rank", {"k_scale": ONES[..., None]}, ValueError, r"k_scale has shape \(2, 2, 10, 1\)"),
    ("scalar", {"k_scale": 0.5}, TypeError, "k_scale must be a NumPy or a CuPy array, not float"),
    (
        *("unified_max", {"q": Q.astype(np.float16), "unified_max": 0.0}, ValueError),
        "unified_max must be None for caches of 8 bits: leave it out",
    ),
    ("pages", {"block_table": TABLE}, ValueError, "k_scale has shape"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k_cache": INTS, "v_cache": INTS, "out": Q.copy()}
    arguments |= {"k_scale": ONES, "v_scale": ONES}
    if "block_table" in change:
        arguments |= {"k_cache": PAGES, "v_cache": PAGES}
    if "q" in change:
        del arguments["out"]
    before = arguments.get("out", Q).copy()
    with pytest.raises(error, match=message):
        cufa.decode(**{**arguments, **change})
    np.testing.assert_array_equal(arguments.get("out", Q), before)


def test_an_output_in_the_memory_of_scales() -> None:
    memory = np.ones((2, 4, 1, 10), np.float32)
    scales = memory.reshape(2, 4, 10)[:, ::2]
    with pytest.raises(ValueError, match=r"out .* shares memory with k_scale"):
        cufa.decode(Q, INTS, INTS, k_scale=scales, v_scale=ONES, out=memory[..., :8])
