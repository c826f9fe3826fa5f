"""Caches of 8 bits on a GPU: what they hold, decode over it, captures."""

from __future__ import annotations

import copy
import pickle
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from reference import DTYPES, to_host

import cufa
from cufa import KVCache, PagedKVCache

pytestmark = pytest.mark.gpu

H = 2
KINDS = ("fp8", "int8")
OF_16_BITS = ("float16", "bfloat16")


def drawn(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def both(cupy: ModuleType, paged: bool, d: int, dim: int, **options: Any) -> list[Any]:
    """Make the same cache of two layers on the host and on the device."""
    caches = []
    for xp in (np, cupy):
        chosen: dict[str, Any] = {"layers": 2, "xp": xp, **options}
        if dim:
            chosen["rotary"] = cufa.Rotary.of_theta(100.0, dim, 400, xp=xp)
        if paged:
            cache: Any = PagedKVCache(90, 16, 4, H, d, pages_per_sequence=25, **chosen)
            for _ in range(3):
                cache.allocate()
        else:
            cache = KVCache(4, H, 400, d, **chosen)
        caches.append(cache)
    return caches


def assert_same(caches: list[Any], layout: str, exact: bool) -> None:
    """Assert that both hold the same: bit by bit, or but for numbers between two of 8 bits."""
    np.testing.assert_array_equal(to_host(caches[1].lengths), caches[0].host_lengths)
    for layer in range(2):
        for dtype in DTYPES:
            pairs = zip(*(cache.dequantize(layer, dtype=dtype) for cache in caches), strict=True)
            for a, b in pairs:
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                by_head = [x if layout == "bhsd" else x.swapaxes(1, 2) for x in (a, to_host(b))]
                for i, length in enumerate(caches[0].host_lengths.tolist()):
                    x, y = (z[i, :, :length].astype(np.float32) for z in by_head)
                    if exact:
                        np.testing.assert_array_equal(y, x)
                    elif length:
                        eps = {2: 8e-3, 4: 1e-5}[a.itemsize]
                        assert np.isclose(y, x, eps, 1e-6).mean() > 0.995
                        np.testing.assert_allclose(y, x, 0.13, 0.06)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "dim"), [(64, 64), (128, 32), (40, 22), (59, 0), (256, 0)])
def test_gpu_holds_what_the_cpu_holds(
    cupy: ModuleType,
    rng: np.random.Generator,
    d: int,
    dim: int,
    kind: str,
    dtype: str,
    layout: str,
    paged: bool,
) -> None:
    caches = both(cupy, paged, d, dim, dtype=kind, layout=layout)
    for n, counts in ((150, [150, 70, 0, 0]), (1, [1, 1, 1, 0]), (33, [7, 33, 30, 0])):
        arrays = [drawn(rng, 4, h, n, d, dtype=dtype) for h in (H, H, 3 * H)]
        if dim == 0:  # what is not finite, and numbers of all magnitudes
            arrays[0] *= np.exp2(rng.integers(-9, 9, arrays[0].shape)).astype(DTYPES[dtype])
            arrays[0][0, 1, -1, 3], arrays[1][1, 0, -1, 5] = np.nan, np.inf
            arrays[1][0, 0, -1] = 0
        if layout == "bshd":
            arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
        for cache, xp in zip(caches, (np, cupy), strict=True):
            cache.extend(counts)
            for layer in range(2):
                k, v, q = (xp.asarray(array) for array in arrays)
                cache.write(k, v, q=q, layer=layer)
    assert_same(caches, layout, exact=dim == 0)
    for cache in caches:
        cache[:3].reorder([2, 0, 0])
        assert cache.fork(1) == 3
    assert_same(caches, layout, exact=dim == 0)
    for other in (copy.deepcopy(caches[1]), pickle.loads(pickle.dumps(caches[1]))):
        caches[1].extend([3, 1, 1, 5])
        caches[1].truncate(caches[0].host_lengths)
        assert_same([caches[0], other], layout, exact=dim == 0)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", OF_16_BITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [64, 128, 40])
def test_prompts_and_single_tokens(
    cupy: ModuleType, rng: np.random.Generator, d: int, kind: str, dtype: str, paged: bool
) -> None:
    """Attention over what is held, and decode, are as the CPU's in float32."""
    host, there = both(cupy, paged, d, d, dtype=kind)
    arrays = [drawn(rng, 4, h, 130, d, dtype=dtype) for h in (H, H, 4 * H)]
    for cache, xp in ((host, np), (there, cupy)):
        cache.extend([130, 130, 130, 0])
        for layer in range(2):
            k, v, q = (xp.asarray(array) for array in arrays)
            turned = cache.write(k, v, q=q, layer=layer)
        if cache is host:
            expected = cache.decode(turned.astype(np.float32), layer=1)[:3]
            continue
        keys, values = (x[:3] for x in cache.dequantize(1, dtype=dtype))
        prompt = cufa.attention(turned[:3], keys, values, causal=True)
        decoded = cache.decode(turned, layer=1)[:3]
        last = cache.decode(turned[:, :, -1:], layer=1)[:3]
    error = {"float16": 0.01, "bfloat16": 0.04}[dtype]
    for found, rows in ((prompt, np.s_[:]), (decoded, np.s_[:]), (last, np.s_[-1:])):
        difference = to_host(found).astype(np.float32) - expected[:, :, rows]
        assert np.sqrt((difference**2).mean()) < error / 4
        assert np.abs(difference).max() < 8 * error


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_replays_while_sequences_grow(
    cupy: ModuleType, rng: np.random.Generator, stream: Any, kind: str, paged: bool
) -> None:
    host, there = both(cupy, paged, 64, 64, dtype=kind)
    k, q = drawn(rng, 4, H, 1, 64, dtype="float16"), drawn(rng, 4, 8 * H, 1, 64, dtype="float16")
    given = [cupy.asarray(x) for x in (k, k, q)]

    def attend(cache: Any, k: Any, v: Any, q: Any) -> Any:
        return cache.decode(cache.write(k, v, q=q, layer=1), layer=1)

    for cache, arrays in ((host, (k, k, q)), (there, given)):
        cache.extend(1)
        attend(cache, *arrays)
    stream.begin_capture()
    out = attend(there, *given)
    graph = stream.end_capture()
    for _ in range(40):
        for array, into in zip((k, q), (given[:2], given[2:]), strict=True):
            array[...] = drawn(rng, *array.shape, dtype="float16")
            for each in into:
                each.set(array, stream=stream)
        host.extend(1)
        there.extend(1)
        graph.launch(stream)
        expected = attend(host, k, k, q)
        np.testing.assert_allclose(to_host(out), expected, 0.02, 0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_token_do_not_depend_on_its_batch(
    cupy: ModuleType, rng: np.random.Generator, kind: str
) -> None:
    """Nor on whether it came in a prompt, and decode's on the batch with num_splits given."""
    rotary = cufa.Rotary.of_theta(100.0, 64, 400, xp=cupy)
    k, v, q = (cupy.asarray(drawn(rng, 4, h, 200, 64, dtype="bfloat16")) for h in (H, H, 4 * H))
    together = KVCache(4, H, 400, 64, dtype=kind, rotary=rotary, xp=cupy)
    turned = together.append(k, v, q=q)
    out = together.decode(turned[:, :, -1:], num_splits=3)
    for i in range(4):
        alone = PagedKVCache(25, 16, 1, H, 64, dtype=kind, rotary=rotary, xp=cupy)
        alone.allocate()
        part = slice(i, i + 1)
        for new in (slice(0, 7), *(slice(n, n + 1) for n in range(7, 200))):
            its = alone.append(k[part, :, new], v[part, :, new], q=q[part, :, new])
        for a, b in zip(
            alone.dequantize(dtype="float32"), together.dequantize(dtype="float32"), strict=True
        ):
            np.testing.assert_array_equal(to_host(a)[0], to_host(b)[i])
        contiguous = KVCache(1, H, 400, 64, dtype=kind, rotary=rotary, xp=cupy)
        contiguous.append(k[part], v[part])
        np.testing.assert_array_equal(
            to_host(contiguous.decode(its, num_splits=3)), to_host(out)[part]
        )


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "dim"), [(64, 64), (128, 0), (40, 22), (256, 64)])
def test_smooth(
    cupy: ModuleType,
    rng: np.random.Generator,
    d: int,
    dim: int,
    kind: str,
    dtype: str,
    paged: bool,
) -> None:
    """The cache, decode and its log-sum-exp are those of the CPU."""
    caches = both(cupy, paged, d, dim, dtype=kind, smooth=True)
    for n, counts in ((300, [300, 70, 0, 0]), (1, [1, 1, 1, 0]), (33, [7, 33, 30, 0])):
        arrays = [drawn(rng, 4, h, n, d, dtype=dtype) for h in (H, H, 3 * H)]
        arrays[0][..., d // 2 - 3 : d // 2] += np.array([8, -9, 5], DTYPES[dtype])
        turned = []
        for cache, xp in zip(caches, (np, cupy), strict=True):
            cache.extend(counts)
            for layer in range(2):
                k, v, q = (xp.asarray(array) for array in arrays)
                new = cache.write(k, v, q=q, layer=layer)
            turned.append(new)
    assert_same(caches, "bhsd", exact=False)
    for cache in caches:
        cache[:3].reorder([2, 0, 0])
        assert cache.fork(1) == 3
    assert_same(caches, "bhsd", exact=False)
    if dtype == "float32":
        return
    expected, lse = caches[0].decode(turned[0].astype(np.float32), layer=1, return_lse=True)
    out, its_lse = caches[1].decode(turned[1], layer=1, return_lse=True)
    error = {"float16": 0.02, "bfloat16": 0.08}[dtype]
    difference = to_host(out).astype(np.float32) - expected
    assert np.sqrt((difference**2).mean()) < error
    np.testing.assert_allclose(to_host(its_lse), lse, error, 2 * error)
    with pytest.raises(ValueError, match="softcap must be None where the cache is smooth"):
        caches[1].decode(turned[1], layer=1, softcap=9.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_smooth_cache_is_replayed(
    cupy: ModuleType, rng: np.random.Generator, stream: Any, kind: str
) -> None:
    """A sequence that begins in a replay has a mean of its own."""
    host, there = both(cupy, True, 64, 64, dtype=kind, smooth=True)
    k, q = drawn(rng, 4, H, 8, 64, dtype="float16"), drawn(rng, 4, 8 * H, 8, 64, dtype="float16")
    k[..., 40:44] += np.float16(9)
    given = [cupy.asarray(x) for x in (k, k, q)]

    def attend(cache: Any, k: Any, v: Any, q: Any) -> Any:
        turned = cache.write(k, v, q=q, layer=1)
        return cache.decode(turned, layer=1, return_lse=True)

    counts = [8, 3, 0, 0]
    for cache, arrays in ((host, (k, k, q)), (there, given)):
        cache.extend(counts)
        attend(cache, *arrays)
    stream.begin_capture()
    out = attend(there, *given)
    graph = stream.end_capture()
    for counts in ([1, 8, 5, 0], [8, 8, 8, 0]):
        host.extend(counts)
        there.extend(counts)
        graph.launch(stream)
        expected = attend(host, k, k, q)
        for a, b in zip(out, expected, strict=True):
            np.testing.assert_allclose(to_host(a), b, 0.03, 0.03)
