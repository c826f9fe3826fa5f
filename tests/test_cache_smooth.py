"""Caches of 8 bits that take a mean off keys."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from reference import DTYPES

import cufa
from cufa import KVCache, PagedKVCache
from cufa.caches.store import Store

H, D = 2, 64
KINDS = ("fp8", "int8")
OFFSETS = {17: -20.0, 40: 25.0, 50: 30.0}  # of channels


@pytest.fixture(params=["contiguous", "paged"])
def empty(request: pytest.FixtureRequest) -> Any:
    """Make an empty cache of three sequences of up to 400 tokens."""

    def make(**options: Any) -> Any:
        if request.param == "contiguous":
            return KVCache(3, H, 400, D, **options)
        cache = PagedKVCache(90, 16, 3, H, D, pages_per_sequence=25, **options)
        for _ in range(3):
            cache.allocate()
        return cache

    return make


def drawn(rng: np.random.Generator, heads: int, n: int, offsets: bool = False) -> np.ndarray:
    x = rng.standard_normal((3, heads, n, D), np.float32)
    for channel, offset in OFFSETS.items() if offsets else ():
        x[..., channel] += offset
    return x


def rmse(x: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((x - expected) ** 2).mean()))


@pytest.mark.parametrize("kind", KINDS)
def test_channels_with_a_mean_cost_nothing(rng: np.random.Generator, kind: str) -> None:
    """The result is as exact as without the mean, and the log-sum-exp is that with it."""
    errors, of_lse = {}, {}
    for offsets in (False, True):
        for smooth in (False, True):
            its = np.random.default_rng(0)
            cache = KVCache(3, H, 400, D, dtype=kind, smooth=smooth)
            exact = KVCache(3, H, 400, D, dtype="float32")
            for n in (299, 1, 1):
                k, v, q = drawn(its, H, n, offsets), drawn(its, H, n), drawn(its, 4 * H, n)
                cache.append(k, v)
                exact.append(k, v)
            out, lse = cache.decode(q, return_lse=True)
            expected, its_lse = exact.decode(q, return_lse=True)
            errors[offsets, smooth] = rmse(out, expected)
            of_lse[offsets, smooth] = rmse(lse, its_lse)
    assert errors[True, True] < 1.3 * errors[False, False]
    assert of_lse[True, True] < 2 * of_lse[False, False] + 1e-3
    assert errors[True, False] > 2 * errors[False, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_first_tokens_say_what_is_taken_off(
    rng: np.random.Generator, empty: Any, layout: Any, kind: str
) -> None:
    """And it goes where a sequence goes: forks, reorder, copies; a new sequence has its own."""
    rotary = cufa.Rotary.of_theta(1e6, 16, 400)
    cache = empty(dtype=kind, smooth=True, layout=layout, rotary=rotary)

    def ordered(x: np.ndarray) -> np.ndarray:
        return x if layout == "bhsd" else x.swapaxes(1, 2)

    def held(cache: Any, i: int) -> np.ndarray:
        found: np.ndarray = ordered(cache.dequantize(dtype="float32")[0])
        return found[i, :, : cache.host_lengths[i]]

    tokens = [drawn(rng, H, n, offsets=True) for n in (270, 1, 9)]
    rows = [np.empty((H, 0, D), np.float32) for _ in range(3)]

    def append(x: np.ndarray, counts: list[int]) -> None:
        cache.append(ordered(x), ordered(x), counts=counts)
        for i, n in enumerate(counts):
            if n:
                new = x[i : i + 1, :, x.shape[2] - n :]
                turned = rotary.apply(new, rows[i].shape[1])[0]
                rows[i] = np.concatenate([rows[i], turned], axis=1)

    def assert_holds(cache: Any) -> None:
        for i in range(3):
            found = held(cache, i)
            assert found.shape == rows[i].shape
            if found.size:
                # Steps are those of what is left, of some 4 in magnitude.
                assert np.abs(found - rows[i]).max() < (0.3 if kind == "fp8" else 0.04)

    append(tokens[0], [270, 100, 0])
    append(tokens[1], [1, 1, 0])
    assert_holds(cache)
    cache.reorder([1, 0, 2])
    rows[:2] = rows[1], rows[0]
    append(tokens[1], [1, 1, 0])
    assert cache.fork(0) == 2 if isinstance(cache, KVCache) else True
    if isinstance(cache, KVCache):
        rows[2] = rows[0]
        append(tokens[2], [1, 2, 9])
    assert_holds(cache)
    for other in (copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert_holds(other)
    means = 4 * 3 * H * D / 1e6
    assert "smooth" in repr(cache)
    assert float(repr(cache).split(" MB")[0].split()[-1]) == pytest.approx(
        (2 * math.prod(cache.scales()[0].shape) * (D + 4)) / 1e6 + means, rel=5e-3
    )
    cache.truncate([0, 5, 5 if isinstance(cache, KVCache) else 0])
    rows[:] = [x[:, :n] for x, n in zip(rows, cache.host_lengths, strict=True)]
    append(-tokens[2], [9, 0, 0])
    assert_holds(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_features(rng: np.random.Generator, empty: Any, kind: str) -> None:
    """Options that do not see the mean give the same; where one would, a call is refused."""
    caches = [empty(dtype=kind, smooth=smooth) for smooth in (False, True)]
    k, v, q = drawn(rng, H, 120), drawn(rng, H, 120), drawn(rng, 2 * H, 5)
    for cache in caches:
        cache.append(k, v, counts=[120, 3, 0])
    slopes = np.linspace(0.01, 0.2, 2 * H, dtype=np.float32)
    for options in ({}, {"window": (20, None)}, {"alibi_slopes": slopes}, {"scale": -0.2}):
        chosen: dict[str, Any] = options
        (a, lse_a), (b, lse_b) = (x.decode(q, return_lse=True, **chosen) for x in caches)
        np.testing.assert_array_equal(np.isneginf(lse_a), np.isneginf(lse_b))
        assert rmse(a, b) < (0.02 if kind == "fp8" else 0.005)
        seen = ~np.isneginf(lse_a)
        assert rmse(lse_a[seen], lse_b[seen]) < 0.03
        np.testing.assert_array_equal(caches[1].decode(q, **chosen), b)
    sinks = np.ones(2 * H, np.float32)
    for name, given in (("softcap", {"softcap": 5.0}), ("sinks", {"sinks": sinks})):
        refused: dict[str, Any] = given
        with pytest.raises(ValueError, match=f"{name} must be None where the cache is smooth"):
            caches[1].decode(q, **refused)
        caches[0].decode(q, **refused)
    for dtype in DTYPES:
        with pytest.raises(ValueError, match=f"smooth must be False where dtype is {dtype}: it"):
            empty(dtype=dtype, smooth=True)
    with pytest.raises(TypeError, match="smooth must be True or False, not int"):
        empty(dtype=kind, smooth=1)


def test_what_is_not_finite_is_in_no_mean(rng: np.random.Generator) -> None:
    cache = KVCache(1, 1, 20, D, dtype="fp8", smooth=True)
    k = 10 + rng.standard_normal((1, 1, 9, D), np.float32)
    expected = k.copy()
    k[0, 0, 5, 3], k[0, 0, 7, 0] = np.inf, np.nan
    k[0, 0, :, 9] = np.nan
    cache.append(k, k)
    found = cache.dequantize(dtype="float32")[0]
    np.testing.assert_array_equal(np.isnan(found), ~np.isfinite(k))
    assert np.nanmax(np.abs(found - expected)) < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_large_means_are_not_taken_off(kind: str) -> None:
    """A key less such a mean could be infinite."""
    cache = KVCache(1, 1, 20, D, dtype=kind, smooth=True)
    k = np.full((1, 1, 1, D), 3e38, np.float32)
    for sign in (1, -1):
        cache.append(sign * k, k)
        found = cache.dequantize(dtype="float32")[0]
        np.testing.assert_allclose(found[0, 0, -1], sign * k[0, 0, 0], 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("dim", [1, 3, D])
def test_the_mean_is_the_same_in_any_layout_and_strides(
    rng: np.random.Generator, dim: int, heads: int, kind: str
) -> None:
    """Bytes and scales are, too."""
    k = 5 + rng.standard_normal((2, heads, 300, dim), np.float32)
    k_of_columns = np.ascontiguousarray(k.swapaxes(2, 3)).swapaxes(2, 3)
    in_bshd = np.ascontiguousarray(k.swapaxes(1, 2))
    found = []
    for given in (k, np.asfortranarray(k), k_of_columns):
        cache = KVCache(2, heads, 300, dim, dtype=kind, smooth=True)
        cache.append(given, given)
        found.append(cache.scales()[0])
    for given in (in_bshd, np.asfortranarray(in_bshd)):
        turned = KVCache(2, heads, 300, dim, dtype=kind, smooth=True, layout="bshd")
        turned.append(given, given)
        found.append(turned.scales()[0].swapaxes(1, 2))
    alone = KVCache(1, heads, 300, dim, dtype=kind, smooth=True)
    alone.append(k_of_columns[1:], k_of_columns[1:])
    for scales in found:
        np.testing.assert_array_equal(scales, found[0])
    np.testing.assert_array_equal(alone.scales()[0][0], found[0][1])


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_queries_that_see_no_key_have_no_log_sum_exp(
    rng: np.random.Generator, empty: Any, number: float
) -> None:
    """Whatever they hold, and whatever mean the sequence had."""
    q = np.full((3, 2 * H, 4, D), number, np.float32)
    caches = [empty(dtype="int8", smooth=smooth) for smooth in (False, True)]
    for cache in caches:
        k = drawn(np.random.default_rng(0), H, 3, offsets=True)
        cache.append(k, k)
        cache.truncate([3, 2, 0])
    plain, smooth = (cache.decode(q, return_lse=True)[1] for cache in caches)
    assert np.isneginf(plain[:, :, 0]).all()
    assert np.isneginf(plain[2]).all()
    np.testing.assert_array_equal(np.isneginf(smooth), np.isneginf(plain))


def test_a_reorder_that_fails_moves_no_mean(
    rng: np.random.Generator, empty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = empty(dtype="int8", smooth=True)
    k = np.arange(3, dtype=np.float32)[:, None, None, None] + drawn(rng, H, 5, offsets=True)
    cache.append(k, k)
    before = cache.dequantize(dtype="float32")[0]

    def fail(_: Store) -> None:
        patch.undo()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Store, "send", fail)
        with pytest.raises(MemoryError):
            cache.reorder([2, 0, 1])
    np.testing.assert_array_equal(cache.dequantize(dtype="float32")[0], before)
    cache.reorder([2, 0, 1])
    np.testing.assert_array_equal(cache.dequantize(dtype="float32")[0], before[[2, 0, 1]])
