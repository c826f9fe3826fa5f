"""Caches of 8 bits on a GPU that the host plays, with the source of their kernels."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from exhaustive import exhaustive
from played_gpu import Gpu, Stream, on_gpu
from reference import DTYPES
from test_append import on_gpu_rotary
from test_emulated import emulated, emulator  # noqa: F401

import cufa
from cufa.launch import expand as launch
from cufa.problem.tokens import Held
from cufa.quantized.rows import KINDS as ROWS
from cufa.quantized.rows import numbers_of

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]

H, D, DV = 2, 16, 24
KINDS = ("fp8", "int8")


def drawn(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def both(paged: bool, rotary: bool, **options: Any) -> list[Any]:
    """Make the same cache of two layers on the host and on the device."""
    import cupy  # the played one

    caches: list[Any] = []
    for xp in (np, cupy):
        chosen: dict[str, Any] = {"layers": 2, "head_dim_v": DV, "xp": xp, **options}
        if rotary:
            chosen["rotary"] = cufa.Rotary.of_theta(100.0, 16, 48)
            if xp is cupy:
                chosen["rotary"] = on_gpu_rotary(chosen["rotary"])
        if paged:
            cache = cufa.PagedKVCache(20, 4, 3, H, D, pages_per_sequence=12, **chosen)
            cache.allocate(), cache.allocate()
            caches.append(cache)
        else:
            caches.append(cufa.KVCache(3, H, 48, D, **chosen))
    return caches


def assert_same(exact: bool, host: Any, there: Any, layout: str) -> None:
    """Assert that both have the same lengths, tables and tokens: bit by bit where it is exact."""
    np.testing.assert_array_equal(there.host_lengths, host.host_lengths)
    np.testing.assert_array_equal(there.lengths.get(), host.host_lengths)
    for layer, dtype in product(range(2), DTYPES):
        pairs = zip(*(c.dequantize(layer, dtype=dtype) for c in (host, there)), strict=True)
        for a, b in pairs:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            by_head = [x if layout == "bhsd" else x.swapaxes(1, 2) for x in (a, b.get())]
            for i in np.flatnonzero(host.host_lengths):
                x, y = (z[i, :, : host.host_lengths[i]].astype(np.float32) for z in by_head)
                if exact:
                    np.testing.assert_array_equal(y, x)
                else:
                    eps = {2: 8e-3, 4: 1e-5}[a.itemsize]
                    assert np.isclose(y, x, eps, 1e-6).mean() > 0.99
                    np.testing.assert_allclose(y, x, 0.13, 0.05)


@exhaustive("others", one_in=3)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rotary", "smooth"), [(False, False), (True, False), (True, True)], ids=str
)
def test_the_device_holds_what_the_host_holds(
    rng: np.random.Generator, rotary: bool, smooth: bool, kind: str, layout: str, paged: bool
) -> None:
    caches = both(paged, rotary, dtype=kind, layout=layout, smooth=smooth)
    puts: list[Any] = [np.asarray, on_gpu]
    for dtype, counts in (("bfloat16", [7, 2, 0]), ("float32", [1, 1, 0]), ("float16", [5, 9, 0])):
        n = max(counts)
        shapes = ((H, D), (H, DV), (2 * H, D))
        k, v, q = (drawn(rng, dtype, 3, h, n, d) for h, d in shapes)
        if layout == "bshd":
            k, v, q = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v, q))
        for cache, put in zip(caches, puts, strict=True):
            cache.extend(counts)
            for layer in range(2):
                cache.write(put(k), put(v), q=put(q), layer=layer)
    assert_same(not rotary, caches[0], caches[1], layout)
    for cache in caches:
        if paged:
            cache.fork(0)
            cache.free(1)
        else:
            cache.reorder([1, 0, 0])
    assert_same(not rotary, caches[0], caches[1], layout)
    assert_same(not rotary, caches[0], copy.deepcopy(caches[1]), layout)
    for cache, put in zip(caches, puts, strict=True):
        cache.extend([1, 0, 2])  # into a page that was shared
        for layer in range(2):
            cache.write(put(k), put(v), layer=layer)
    assert_same(not rotary, caches[0], caches[1], layout)
    np.testing.assert_array_equal(
        caches[1][1:].dequantize(dtype="float32")[0].get()[1],
        caches[1].dequantize(dtype="float32")[0].get()[2],
    )


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("kind", "dtype"), [("fp8", "bfloat16"), ("int8", "float16")])
def test_decode(rng: np.random.Generator, kind: str, dtype: str, layout: str, paged: bool) -> None:
    host, there = both(paged, True, dtype=kind, layout=layout)
    k, v, q = (drawn(rng, dtype, 3, h, 21, d) for h, d in ((H, D), (H, DV), (2 * H, D)))
    if layout == "bshd":
        k, v, q = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v, q))
    host.extend([21, 9, 0])
    there.extend([21, 9, 0])
    for layer in range(2):
        turned = host.write(k, v, q=q, layer=layer)
        turned_there = there.write(on_gpu(k), on_gpu(v), q=on_gpu(q), layer=layer)
    part = np.s_[:, :, -3:] if layout == "bhsd" else np.s_[:, -3:]
    wide = turned[part].astype(np.float32)
    expected, lse = host.decode(wide, layer=1, softcap=9.0, return_lse=True)
    out, lse_there = there.decode(turned_there[part], layer=1, softcap=9.0, return_lse=True)
    np.testing.assert_allclose(out.get().astype(np.float32), expected, 0.03, 0.03)
    np.testing.assert_allclose(lse_there.get(), lse, 0.02, 0.02)
    with pytest.raises(TypeError, match="q has dtype float32: on the GPU, caches of 8 bits take"):
        there.decode(on_gpu(wide), layer=1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_smooth_log_sum_exp(rng: np.random.Generator, layout: str) -> None:
    host, there = both(True, True, dtype="int8", layout=layout, smooth=True)
    k, v, q = (drawn(rng, "bfloat16", 3, h, 21, d) for h, d in ((H, D), (H, DV), (4 * H, D)))
    k[:, 1, :, 2:5] += 4
    q[2] = np.inf  # of queries that see no key
    if layout == "bshd":
        k, v, q = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v, q))
    for cache in (host, there):
        cache.extend([21, 9, 0])
    for layer in range(2):
        turned = host.write(k, v, q=q, layer=layer)
        turned_there = there.write(on_gpu(k), on_gpu(v), q=on_gpu(q), layer=layer)
    expected, lse = host.decode(turned.astype(np.float32), layer=1, scale=0.3, return_lse=True)
    out, lse_there = there.decode(turned_there, layer=1, scale=0.3, return_lse=True)
    np.testing.assert_allclose(out.get().astype(np.float32), expected, 0.03, 0.03)
    np.testing.assert_allclose(lse_there.get(), lse, 0.02, 0.03)
    assert np.isneginf(lse[1, :, :12]).all()


def test_a_write_is_captured(gpu: Gpu, rng: np.random.Generator) -> None:
    _, cache = both(paged=True, rotary=True, dtype="fp8")
    k, v = (on_gpu(drawn(rng, "float16", 3, H, 1, d)) for d in (D, DV))
    cache.extend(1)
    cache.write(k, v)
    gpu.stream = Stream(capturing=True)
    cache.write(k, v)
    with pytest.raises(RuntimeError, match="extend cannot be captured into a CUDA graph"):
        cache.extend(1)
    apart = on_gpu(np.zeros((3, H, 1, 2 * D), np.float16))[..., ::2]
    with pytest.raises(ValueError, match=r"k .* would be copied"):
        cache.write(apart, v, layer=1)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_do_not_exist_are_not_read(kind: str) -> None:
    values = np.zeros((3, 1, 4, 16), np.uint8 if kind == "fp8" else np.int8)
    out = on_gpu(np.full((2, 1, 6, 16), 7, np.float32))
    table = on_gpu(np.array([[2, 3], [-1, 0]], np.int32))
    launch.expand(Held(on_gpu(values), on_gpu(np.ones((3, 1, 4), np.float32)), table), out)
    written = [[True] * 4 + [False] * 2, [False] * 4 + [True] * 2]
    np.testing.assert_array_equal((out.get()[:, 0] == 0).all(axis=-1), written)


@pytest.mark.parametrize("kind", KINDS)
def test_each_byte(kind: str) -> None:
    """All of them, in each dtype, and lengths that end within a block."""
    import cupy  # the played one

    host = np.arange(256, dtype=np.uint8).reshape(1, 1, 1, 256).repeat(37, 2)
    host = host.view(ROWS[kind].on_device)
    scales = np.exp2(np.arange(37, dtype=np.float32) - 18).reshape(1, 1, 37) * np.float32(1.3)
    for dtype in DTYPES.values():
        out = cupy.empty((1, 1, 37, 256), dtype)
        launch.expand(Held(on_gpu(host), on_gpu(scales), None), out)
        with np.errstate(over="ignore"):
            expected = numbers_of(host, scales, np).astype(dtype)
        got = out.get()
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
