"""Caches on a GPU that the host plays, with the source of the kernel that writes tokens."""

from __future__ import annotations

import copy
from typing import Any

import host_kernels
import numpy as np
import pytest
from played_gpu import Gpu, Stream, on_gpu
from reference import DTYPES
from test_append import INSTANCES, on_gpu_rotary

import cufa
from cufa.caches.layer import Layer
from cufa.caches.store import Store
from cufa.compiler import jit
from cufa.specs.instance import Instance

H, D = 2, 16


@pytest.fixture(scope="module")
def on_host() -> dict[Instance, Any]:
    return host_kernels.compiled("AppendParams", INSTANCES)


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, on_host: dict[Instance, Any]) -> None:
    """Play a GPU that runs the kernel's own source."""
    monkeypatch.setattr(jit, "kernel", lambda instance, _gpu, _device_id: on_host[instance])


def drawn(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def both(paged: bool, rotary: bool = True, **options: Any) -> list[Any]:
    """Make the same cache of two layers on the host and on the device."""
    import cupy  # the played one

    caches: list[Any] = []
    for xp in (np, cupy):
        chosen: dict[str, Any] = {"dtype": "float32", "layers": 2, "xp": xp, **options}
        if rotary:
            chosen["rotary"] = cufa.Rotary.of_theta(100.0, 8, 48)
            if xp is cupy:
                chosen["rotary"] = on_gpu_rotary(chosen["rotary"])
        if paged:
            cache = cufa.PagedKVCache(20, 4, 3, H, D, pages_per_sequence=12, **chosen)
            cache.allocate(), cache.allocate()
            caches.append(cache)
        else:
            caches.append(cufa.KVCache(3, H, 48, D, **chosen))
    return caches


def assert_same(host: Any, there: Any) -> None:
    """Assert that both have the same lengths, tables and tokens."""
    np.testing.assert_array_equal(there.host_lengths, host.host_lengths)
    np.testing.assert_array_equal(there.lengths.get(), host.host_lengths)
    if host.block_table is not None:
        np.testing.assert_array_equal(there.block_table.get(), host.block_table)
    for layer in range(2):
        for a, b in zip(host.layer(layer), there.layer(layer), strict=True):
            eps = {2: 8e-3, 4: 1e-6}[a.itemsize]
            a32, b32 = a.astype(np.float32), b.get().astype(np.float32)
            np.testing.assert_allclose(b32, a32, eps, eps)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_device_holds_what_the_host_holds(
    rng: np.random.Generator, dtype: str, layout: str, paged: bool
) -> None:
    caches = both(paged, dtype=dtype, layout=layout)
    for counts in ([7, 2, 0], [1, 1, 0], [1, 0, 0], [5, 9, 0]):
        n = max(counts)
        k, v, q = (drawn(rng, dtype, 3, h, n, D) for h in (H, H, 2 * H))
        if layout == "bshd":
            k, v, q = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v, q))
        turned = []
        for cache in caches:
            put = np.asarray if cache is caches[0] else on_gpu
            cache.extend(counts)
            for layer in range(2):
                new = cache.write(put(k), put(v), q=put(q), layer=layer)
            turned.append(new)
        eps = {2: 8e-3, 4: 1e-6}[q.itemsize]
        got, expected = turned[1].get().astype(np.float32), turned[0].astype(np.float32)
        np.testing.assert_allclose(got, expected, eps, eps)
        assert_same(*caches)
    if paged:
        for cache in caches:
            cache.fork(0)
            cache.free(1)
            cache.extend([1, 0, 2])
        assert_same(*caches)


@pytest.mark.parametrize("paged", [False, True])
def test_a_second_write_is_refused_but_in_a_capture(
    gpu: Gpu, rng: np.random.Generator, paged: bool
) -> None:
    """A capture writes nothing; its replays follow calls of `extend` that the host sees."""
    _, cache = both(paged)
    k, v = (on_gpu(drawn(rng, "float32", 3, H, 1, D)) for _ in range(2))
    with pytest.raises(ValueError, match="no token is new to layer 1"):
        cache.write(k, v, layer=1)
    cache.extend(1)
    cache.write(k, v, layer=1)
    with pytest.raises(ValueError, match="layer 1 has the newest tokens of sequence 0"):
        cache.write(k, v, layer=1)
    gpu.stream = Stream(capturing=True)
    cache.write(k, v, layer=1)
    cache.write(k, v)
    for name, refused in (
        ("extend", lambda: cache.extend(1)),
        ("truncate", lambda: cache.truncate(0)),
    ):
        with pytest.raises(RuntimeError, match=f"{name} cannot be captured into a CUDA graph"):
            refused()  # type: ignore[no-untyped-call]
    gpu.stream = Stream()
    cache.write(k, v)  # the captured one has not run
    for _ in range(2):
        cache.extend(1)  # and a replay, which the host does not see
    cache.reorder([1, 0, 2])
    cache.extend(1)
    cache.write(k, v)
    with pytest.raises(ValueError, match="layer 0 has the newest tokens of sequence 0"):
        cache.write(k, v)


@pytest.mark.parametrize("paged", [False, True])
def test_no_graph_writes_a_copy(gpu: Gpu, rng: np.random.Generator, paged: bool) -> None:
    """It has what replays have written, which the host does not see, and counts from there on."""
    _, cache = both(paged)
    k, v = (on_gpu(drawn(rng, "float32", 3, H, 1, D)) for _ in range(2))
    gpu.stream = Stream(capturing=True)
    for layer in range(2):
        cache.write(k, v, layer=layer)
    gpu.stream = Stream()
    cache.extend(1)  # and a replay
    for other in (copy.copy(cache), copy.deepcopy(cache)):
        other.reorder([1, 0, 2])
        other.extend(1)
        with pytest.raises(ValueError, match="layer 0 holds 1 of the 2 tokens of sequence 1"):
            other.reorder([1, 0, 2])
    cache.extend(1)
    cache.reorder([1, 0, 2])


def test_nobody_is_there_when_a_graph_is_captured(gpu: Gpu, rng: np.random.Generator) -> None:
    """A graph serves whoever is in the cache when it is replayed."""
    _, cache = both(paged=True)
    q = on_gpu(drawn(rng, "float32", 1, H, 1, D))
    with pytest.raises(ValueError, match="sequence 2 has not been allocated"):
        cache[2:].decode(q)
    gpu.stream = Stream(capturing=True)
    k = on_gpu(drawn(rng, "float32", 1, H, 1, D))
    cache[2:].write(k, k)


@pytest.mark.parametrize("paged", [False, True])
def test_sequences_are_moved_and_copied(gpu: Gpu, rng: np.random.Generator, paged: bool) -> None:
    caches = both(paged, dtype="bfloat16")
    k, v = (drawn(rng, "bfloat16", 3, H, 6, D) for _ in range(2))
    for cache in caches:
        cache.extend([6, 3, 0])
        for layer in range(2):
            put = np.asarray if cache is caches[0] else on_gpu
            cache.write(put(k), put(v), layer=layer)
        cache.reorder([1, 0, 2])
        cache.fork(1)
        cache.reorder([2, 0, 0])
    assert_same(*caches)
    copies = [copy.deepcopy(cache) for cache in caches]
    assert repr(copies[1]) == repr(caches[1])
    for cache in caches:
        cache[1:].reset()
        if paged:
            cache.allocate()
        cache.extend([1, 5, 0])
    assert_same(*caches)
    assert_same(*copies)
    for cache in copies:
        cache.extend([1, 2, 4])
    assert_same(*copies)
    gpu.stream = Stream(capturing=True)
    there = caches[1]
    for name, refused in (
        ("reorder", lambda: there.reorder([1, 0, 2])),
        ("fork", lambda: there.fork(0)),
        ("reset", lambda: there.reset()),
        ("a copy of a cache", lambda: copy.copy(there)),
    ):
        with pytest.raises(RuntimeError, match=f"{name} cannot be captured into a CUDA graph"):
            refused()  # type: ignore[no-untyped-call]


def test_rows_that_no_kernel_reads_are_copied(gpu: Gpu, rng: np.random.Generator) -> None:
    host, there = both(paged=False)
    k, v, q = (drawn(rng, "float32", 3, h, D, D).swapaxes(2, 3) for h in (H, H, 2 * H))
    for cache in (host, there):
        cache.extend(D)
    given = [on_gpu(np.ascontiguousarray(x.swapaxes(2, 3))).swapaxes(2, 3) for x in (k, v, q)]
    turned = there.write(*given[:2], q=given[2])
    np.testing.assert_allclose(turned.get(), host.write(k, v, q=q), 1e-6, 1e-6)
    assert_same(host, there)
    gpu.stream = Stream(capturing=True)
    with pytest.raises(ValueError, match=r"k .* would be copied, .* whose last axis is contiguous"):
        there.write(*given[:2], q=given[2], layer=1)


def test_tokens_of_a_kind_are_checked_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what is illegal by its address alone is refused each time."""
    _, cache = both(paged=False)
    checked: list[int] = []
    whole = Layer._checked

    def counted(*arrays: Any) -> Any:
        checked.append(1)
        return whole(*arrays)

    monkeypatch.setattr(Layer, "_checked", counted)
    for _ in range(5):
        k, v, q = (on_gpu(drawn(rng, "float32", 3, h, 1, D)) for h in (H, H, 2 * H))
        cache.extend(1)
        cache.write(k, v, q=q)
    assert len(checked) == 1
    cache.extend(1)
    own = cache.layer()[0][:, :, 3:4]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"k .* shares memory with the cache"):
            cache.write(own, v)
    with pytest.raises(TypeError, match="v is a numpy array, but the cache is a cupy array"):
        cache.write(k, v.get())
    odd = on_gpu(np.zeros(k.nbytes + 2, np.uint8))
    odd = odd.view_of(odd.host[2:].view(np.float32).reshape(k.shape))
    with pytest.raises(ValueError, match=r"k .* no multiple of 4 bytes"):
        cache.write(odd, v, q=q)
    cache.write(k, v, q=q)


def test_views_of_scales_are_not_taken(rng: np.random.Generator) -> None:
    _, cache = both(paged=False, rotary=False, dtype="int8", layers=1)
    k = on_gpu(drawn(rng, "float32", 3, H, 3, D))
    own = [scale.view_of(scale.host.reshape(k.shape)) for scale in cache.scales()]
    for name, arrays in (("k", (own[0], k)), ("v", (k, own[1]))):
        with pytest.raises(ValueError, match=f"^{name} .* shares memory with the cache"):
            cache.append(*arrays)


def test_what_is_sent_is_not_what_the_host_has_by_then(gpu: Gpu) -> None:
    """A copy that is pending has memory of its own, which later ones take again."""
    taken: list[int] = []
    import cupy  # the played one

    alloc = cupy.cuda.alloc_pinned_memory

    def counted(nbytes: int) -> Any:
        taken.append(nbytes)
        return alloc(nbytes)

    cupy.cuda.alloc_pinned_memory = counted
    _, cache = both(paged=False)
    for n in range(1, 20):
        cache.extend(1)
        np.testing.assert_array_equal(cache.lengths.get(), [n] * 3)
    assert taken == [24] * 3


def test_a_device_that_fails_has_the_lengths_of_before(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache = both(paged=True, layers=1)
    k, v = (on_gpu(drawn(rng, "float32", 3, H, 3, D)) for _ in range(2))
    cache.append(k, v)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("cufa.launch.launch.taken_buffer", fail)
        with pytest.raises(MemoryError):
            cache.append(k, v)
    np.testing.assert_array_equal(cache.lengths.get(), [3, 3, 0])
    cache.append(k, v)
    np.testing.assert_array_equal(cache.lengths.get(), [6, 6, 0])


def test_a_copy_that_fails_leaves_the_lengths_of_before(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are copied when lengths have been sent, which are sent back then."""
    caches = both(paged=False)
    k, v = (drawn(rng, "float32", 3, H, 6, D) for _ in range(2))
    for cache in caches:
        put = np.asarray if cache is caches[0] else on_gpu
        cache.extend([6, 3, 0])
        for layer in range(2):
            cache.write(put(k), put(v), layer=layer)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_copy_rows", fail)
        with pytest.raises(MemoryError):
            caches[1].reorder([1, 2, 0])
    assert_same(*caches)
    for cache in caches:
        cache.reorder([1, 2, 0])
    assert_same(*caches)
