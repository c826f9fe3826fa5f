"""KVCache and PagedKVCache of 8 bits: what they hold and give, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from eight_bits import exact, held_numbers
from reference import DTYPES

import cufa
from cufa import KVCache, PagedKVCache

H, D, DV = 2, 24, 17
KINDS = ("fp8", "int8")
#: The most by which a number of magnitude 1 or less may differ, where the largest of a row is 1.
ERROR = {"fp8": 16 / 448, "int8": 0.5 / 127}


@pytest.fixture(params=["contiguous", "paged"])
def empty(request: pytest.FixtureRequest) -> Any:
    """Make an empty cache of three sequences of up to 40 tokens."""

    def make(**options: Any) -> Any:
        options = {"head_dim_v": DV, **options}
        if request.param == "contiguous":
            return KVCache(3, H, 40, D, **options)
        cache = PagedKVCache(36, 4, 3, H, D, pages_per_sequence=10, **options)
        for _ in range(3):
            cache.allocate()
        return cache

    return make


def drawn(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_once(rng: np.random.Generator, empty: Any, dtype: str, kind: str) -> None:
    """From what rotary gives in float32; new tokens may have any dtype, each time another one."""
    rotary = cufa.Rotary.of_theta(100.0, 8, 40)
    cache = empty(dtype=kind, rotary=rotary)
    lengths = [0, 0, 0]
    for n, counts in ((9, [9, 4, 0]), (1, [1, 1, 1]), (11, [2, 11, 5])):
        k, v = drawn(rng, 3, H, n, D, dtype=dtype), drawn(rng, 3, H, n, DV, dtype=dtype)
        q = drawn(rng, 3, 2 * H, n, D, dtype=dtype)
        turned = cache.append(k, v, q=q, counts=counts)
        assert turned.dtype == q.dtype
        for i, count in enumerate(counts):
            if not count:
                continue
            new, first = slice(n - count, n), lengths[i]
            wide = k[i : i + 1, :, new].astype(np.float32)
            expected = rotary.apply(wide, first)[0], v[i, :, new].astype(np.float32)
            lengths[i] += count
            for found, rows in zip(held_numbers(cache, i), expected, strict=True):
                largest = np.abs(rows).max(axis=-1, keepdims=True)
                error = np.abs(found[:, first:] - rows)
                assert (error <= ERROR[kind] * largest * (1 + 1e-5)).all()
                at = np.abs(rows).argmax(axis=-1)[..., None]
                largest_found = np.take_along_axis(found[:, first:], at, -1)
                np.testing.assert_allclose(np.abs(largest_found), largest, 1e-6)
    assert cache.host_lengths.tolist() == lengths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_decode_is_attention_over_what_is_held(
    rng: np.random.Generator, empty: Any, layout: Any, kind: str
) -> None:
    cache = empty(dtype=kind, layout=layout, layers=2)
    k, v, q = (drawn(rng, 3, h, 7, d) for h, d in ((H, D), (H, DV), (2 * H, D)))
    ordered = [x if layout == "bhsd" else x.swapaxes(1, 2) for x in (k, v, q)]
    for step, counts in enumerate(([7, 0, 2], [5, 7, 1])):
        cache.extend(counts)
        for layer in range(2):
            cache.write(*(x * np.float32(1 + step + layer) for x in ordered[:2]), layer=layer)
    options: dict[str, Any] = {"softcap": 20.0, "window": (9, None), "return_lse": True}
    out, lse = cache.decode(ordered[2], layer=1, sinks=np.ones(2 * H, np.float32), **options)
    keys, values = cache.dequantize(1, dtype="float32")
    longest = cache.dequantize(1, dtype="float32", length=40)
    assert keys.shape[2 if layout == "bhsd" else 1] == 12
    for i, length in enumerate(cache.host_lengths.tolist()):
        its = [
            x[i : i + 1] if layout == "bhsd" else x[i : i + 1].swapaxes(1, 2)
            for x in (keys, values)
        ]
        its = [x[:, :, :length] for x in its]
        sinks = np.ones(2 * H, np.float32)
        n = min(7, length)  # queries in front of the first key see none, as in decode
        expected, its_lse = cufa.attention(
            q[i : i + 1, :, 7 - n :], *its, causal=True, sinks=sinks, **options
        )
        found = (out if layout == "bhsd" else out.swapaxes(1, 2))[i : i + 1, :, 7 - n :]
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_allclose(lse[i : i + 1, :, 7 - n :], its_lse, atol=1e-5)
        for a, b in zip((keys, values), longest, strict=True):
            part = np.s_[i, :, :length] if layout == "bhsd" else np.s_[i, :length]
            np.testing.assert_array_equal(a[part], b[part])
    scales = cache.scales(1)
    of_arrays = cufa.decode(
        ordered[2],
        *cache.layer(1),
        k_scale=scales[0],
        v_scale=scales[1],
        lengths=cache.lengths,
        block_table=cache.block_table,
        layout=layout,
        sinks=np.ones(2 * H, np.float32),
        **options,
    )
    np.testing.assert_array_equal(of_arrays[0], out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_scales_go_where_tokens_go(
    rng: np.random.Generator, empty: Any, layout: Any, kind: str
) -> None:
    """Forks, pages that are copied, reorder, copies, pickles, truncate and reset."""
    cache = empty(dtype=kind, layout=layout)
    k, v = exact(rng, kind, 3, H, 11, D), exact(rng, kind, 3, H, 11, DV)
    given = [x if layout == "bhsd" else x.swapaxes(1, 2) for x in (k, v)]

    def assert_holds(cache: Any, *rows: tuple[np.ndarray, np.ndarray]) -> None:
        found = cache.dequantize(dtype="float32")
        for i, each in enumerate(rows):
            for array, expected in zip(found, each, strict=True):
                its = array[i] if layout == "bhsd" else array[i].swapaxes(0, 1)
                np.testing.assert_array_equal(its[:, : expected.shape[1]], expected)
                assert cache.host_lengths[i] == expected.shape[1]

    def of(i: int, n: int, *more: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequence i's first n tokens, and the last of each of others."""
        a, b = (
            np.concatenate([x[i, :, :n], *(x[j, :, -1:] for j in more)], axis=1) for x in (k, v)
        )
        return a, b

    cache.append(*given, counts=[11, 11, 0])
    cache.reorder([1, 0, 0])
    assert_holds(cache, of(1, 11), of(0, 11), of(0, 11))
    cache.truncate([9, 10, 11])
    copies = [copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    cache.append(*given, counts=1)
    assert_holds(cache, of(1, 9, 0), of(0, 10, 1), of(0, 11, 2))
    for other in copies:
        assert_holds(other, of(1, 9), of(0, 10), of(0, 11))
        other.append(*given, counts=[0, 1, 0])
        assert_holds(other, of(1, 9), of(0, 10, 1), of(0, 11))
    cache[2:].reset()
    assert cache.fork(1) == 2
    cache.append(*given, counts=[0, 0, 1])
    assert_holds(cache, of(1, 9, 0), of(0, 10, 1), of(0, 10, 1, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_however_it_came(
    rng: np.random.Generator, empty: Any, kind: str
) -> None:
    rotary = cufa.Rotary.of_theta(100.0, 8, 40)
    k, v = drawn(rng, 3, H, 13, D), drawn(rng, 3, H, 13, DV)
    whole = empty(dtype=kind, rotary=rotary)
    whole.append(k, v)
    parts = empty(dtype=kind, rotary=rotary)
    for i in range(3):
        for n in range(13):
            parts[i : i + 1].append(k[i : i + 1, :, n : n + 1], v[i : i + 1, :, n : n + 1])
    for i in range(3):
        for a, b in zip(held_numbers(whole, i), held_numbers(parts, i), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_half_of_16_bits_and_the_scales(kind: str) -> None:
    wide = KVCache(2, 8, 1000, 128, dtype="bfloat16")
    cache = KVCache(2, 8, 1000, 128, dtype=kind)
    assert repr(wide).endswith("bfloat16, bhsd, numpy, 8.19 MB: lengths 0, 0")
    assert repr(cache).endswith(f"{kind}, bhsd, numpy, 4.22 MB: lengths 0, 0")
    (k, v), scales = cache.layer(), cache.scales()
    of_kind = {"fp8": np.dtype(ml_dtypes.float8_e4m3fn), "int8": np.dtype(np.int8)}
    assert k.dtype == v.dtype == of_kind[kind]
    assert [(x.shape, x.dtype.name) for x in scales] == [((2, 8, 1000), "float32")] * 2
    assert KVCache(2, 8, 9, 16, dtype=of_kind[kind]).scales()[0].shape == (2, 8, 9)
    assert wide.scales() == (None, None)
    odd = KVCache(2, 3, 9, 5, dtype=kind, layout="bshd")
    assert odd.layer()[0].strides[-2] == 16
    assert odd.scales()[0].shape == (2, 9, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite(rng: np.random.Generator, kind: str) -> None:
    """A key with NaN or infinity makes NaN of rows that see it, and of no other."""
    cache = KVCache(1, 1, 10, D, dtype=kind)
    k, q = drawn(rng, 1, 1, 9, D), drawn(rng, 1, 1, 9, D)
    k[0, 0, 5, 3], k[0, 0, 7, 0] = np.inf, np.nan
    cache.append(k, drawn(rng, 1, 1, 9, D))
    out = cache.decode(q)
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1)[0, 0], [False] * 5 + [True] * 4)
    assert np.isfinite(out[0, 0, :5]).all()


def test_which_kind_is_more_exact(rng: np.random.Generator) -> None:
    """int8 by a factor of four, but where a row has a number that is far larger than the others."""
    x = drawn(rng, 1, 1, 500, 128)
    with_outlier = x.copy()
    with_outlier[..., 5] = 100
    errors = {}
    for name, rows in (("plain", x), ("outlier", with_outlier)):
        for kind in KINDS:
            cache = KVCache(1, 1, 500, 128, dtype=kind)
            cache.append(rows, rows)
            error = cache.dequantize(dtype="float32")[0] - rows
            errors[name, kind] = float(np.sqrt((error**2).mean()))
    assert 3.5 < errors["plain", "fp8"] / errors["plain", "int8"] < 4.5
    assert errors["outlier", "fp8"] < errors["outlier", "int8"] / 4


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_scales_are_not_taken(rng: np.random.Generator, kind: str) -> None:
    """They would change while they are read."""
    cache = KVCache(3, H, 3 * D, D, dtype=kind)
    k = drawn(rng, 3, H, 3, D)
    cache.append(k, k)
    k_scale, v_scale = (scale.reshape(k.shape) for scale in cache.scales())
    for name, arrays in (
        ("k", {"k": k_scale, "v": k}),
        ("v", {"k": k, "v": v_scale}),
        ("q", {"k": k, "v": k, "q": v_scale[..., ::-1]}),
    ):
        with pytest.raises(ValueError, match=f"^{name} .* shares memory with the cache"):
            cache.append(**arrays)
    cache.append(k_scale.copy(), v_scale.copy())
    np.testing.assert_array_equal(cache.host_lengths, [6, 6, 6])


def test_refused(rng: np.random.Generator, empty: Any) -> None:
    cache: Any = empty(dtype="fp8", layers=2)
    k, v, q = drawn(rng, 3, H, 9, D), drawn(rng, 3, H, 9, DV), drawn(rng, 3, 2 * H, 9, D)
    cache.extend(9)
    with pytest.raises(ValueError, match="layer 1 holds 0 of the 9 tokens of sequence 0"):
        cache.dequantize(1, dtype="float32")
    cache.write(k, v)
    bytes_k, bytes_v = cache.layer()
    for error, message, refused in (
        (
            TypeError,
            "k has dtype float64: one of float16, bfloat16, float32 is needed; k.astype",
            lambda: cache.write(k.astype(float), v, layer=1),
        ),
        (
            TypeError,
            "k has dtype float8_e4m3fn: one of float16",
            lambda: cache.write(bytes_k[:, :, :9].copy(), bytes_v[:, :, :9].copy(), layer=1),
        ),
        (
            TypeError,
            "v has dtype float16, but k has dtype float32",
            lambda: cache.write(k, v.astype(np.float16), layer=1),
        ),
        (
            TypeError,
            "q has dtype float16, but k has dtype float32",
            lambda: cache.write(k, v, q=q.astype(np.float16), layer=1),
        ),
        (TypeError, "q has dtype float64", lambda: cache.decode(q.astype(float))),
        (
            TypeError,
            "dtype must be one of float16, bfloat16, float32, as .*, not 'fp8'",
            lambda: cache.dequantize(dtype="fp8"),
        ),
        (
            ValueError,
            "length must be 0 to 40, not 41",
            lambda: cache.dequantize(dtype="float32", length=41),
        ),
        (ValueError, "layer must be 0 to 1, not 2", lambda: cache.scales(2)),
        (
            ValueError,
            "dequantize is of caches of 8 bits, but this one is of float32: layer",
            lambda: empty(dtype="float32").dequantize(dtype="float32"),
        ),
    ):
        with pytest.raises(error, match=message):
            refused()
    cache.write(k, v, layer=1)
    assert cache.decode(q, layer=1).shape == (3, 2 * H, 9, DV)
