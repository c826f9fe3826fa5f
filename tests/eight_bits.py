"""Caches of 8 bits with a scale for each key and head, as `cufa.decode` takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from reference import DTYPES, to_host
from test_decode import in_pages, poisoned

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

#: Dtypes of caches. uint8 has the bytes of float8_e4m3fn.
KINDS = ("float8_e4m3fn", "uint8", "int8")


class Cache(NamedTuple):
    """K or V: values (b, h, s, d) of 8 bits, and float32 scales (b, h, s)."""

    values: np.ndarray
    scales: np.ndarray

    @property
    def numbers(self) -> np.ndarray:
        """Return the numbers that values and scales stand for, float32."""
        values = self.values.view(E4M3) if self.values.dtype == np.uint8 else self.values
        return values.astype(np.float32) * self.scales[..., None]

    def turned(self) -> Cache:
        """Return the same with heads behind positions."""
        return Cache(self.values.swapaxes(1, 2), self.scales.swapaxes(1, 2))


def quantized8(x: np.ndarray, kind: str) -> Cache:
    """Return (b, h, s, d) numbers as a cache whose largest value of each key is used."""
    most = np.float32(127 if kind == "int8" else 448)
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=-1)
    scales = np.where(largest > 0, largest / most, 1).astype(np.float32)
    values = x / scales[..., None]
    if kind == "int8":
        return Cache(np.rint(values).astype(np.int8), scales)
    return Cache(values.astype(E4M3).view(kind if kind == "uint8" else E4M3), scales)


def _in_floats(cache: Cache) -> np.ndarray:
    """Return values and scales as one array of float32, in which NaN stands for neither."""
    values = cache.values.view(np.int8 if cache.values.dtype == np.int8 else np.uint8)
    return np.concatenate([values.astype(np.float32), cache.scales[..., None]], axis=-1)


def _of_floats(numbers: np.ndarray, like: Cache) -> Cache:
    """Return the cache; where nothing is, its bytes are NaN of e4m3, and the scales NaN."""
    values, scales = numbers[..., :-1], numbers[..., -1].copy()
    dtype = like.values.dtype
    values = np.where(np.isnan(values), 0x7F, values).astype(np.int16)
    return Cache(values.astype(np.int8 if dtype == np.int8 else np.uint8).view(dtype), scales)


def poisoned8(cache: Cache, lengths: Sequence[int], firsts: Sequence[int] | None = None) -> Cache:
    """As `test_decode.poisoned`."""
    return _of_floats(poisoned(_in_floats(cache), lengths, firsts), cache)


def in_pages8(
    rng: np.random.Generator,
    cache: Cache,
    lengths: Sequence[int],
    page_size: int,
    firsts: list[int] | None = None,
) -> tuple[Cache, np.ndarray]:
    """As `test_decode.in_pages`."""
    pages, table = in_pages(rng, _in_floats(cache), lengths, page_size, firsts)
    return _of_floats(pages, cache), table


def exact(rng: np.random.Generator, kind: str, *shape: int) -> np.ndarray:
    """Draw float32 numbers that a cache of this dtype holds as they are."""
    if kind not in ("fp8", "int8"):
        return rng.standard_normal(shape, np.float32)
    most = 127 if kind == "int8" else 448
    values = rng.integers(0, 256, shape, np.uint8).view(np.int8 if kind == "int8" else E4M3)
    numbers = np.nan_to_num(values.astype(np.float32), nan=0).clip(-most, most)
    numbers[..., :1] = most  # so that the scale is the power of two
    return numbers * np.exp2(rng.integers(-12, 1, (*shape[:-1], 1))).astype(np.float32)


def held_numbers(cache: Any, sequence: int, layer: int = 0) -> list[np.ndarray]:
    """Return what a `KVCache` or `PagedKVCache` holds of a sequence, (heads, tokens, dim) float32.

    K and V come one after the other. The layout is bhsd.
    """
    n, table = int(cache.host_lengths[sequence]), cache.block_table
    found = []
    for values, scales in zip(cache.layer(layer), cache.scales(layer), strict=True):
        parts = []
        for array in (values, scales):
            if array is None:
                continue
            array = to_host(array)
            if table is None:
                parts.append(array[sequence, :, :n])
            else:
                page, slot = np.divmod(np.arange(n), array.shape[2])
                parts.append(array[to_host(table)[sequence, page], :, slot].swapaxes(0, 1))
        if len(parts) == 1:
            found.append(parts[0].astype(np.float32))
        else:
            found.append(Cache(*parts).numbers)
    return found


def assert_every_byte(decode8: Callable[..., Any], dtype: str, kind: str) -> None:
    """Assert that all 256 bytes are what they stand for, as keys and as values.

    `decode8` takes q, `Cache` of K and of V on the host, and options of `cufa.decode`.
    """
    values, ones = np.arange(256, dtype=np.uint8), np.ones((1, 1, 1), np.float32)
    every = Cache(values.reshape(1, 1, 1, 256).view(kind), ones)
    zeros = Cache(np.zeros_like(every.values), ones)
    out = decode8(np.zeros((1, 1, 1, 256), DTYPES[dtype]), zeros, every)
    np.testing.assert_array_equal(to_host(out).astype(np.float32), every.numbers)
    if kind == "uint8":
        values[[0x7F, 0xFF]] = 0  # 0 times NaN is NaN
    q = np.eye(256, dtype=np.float32).astype(DTYPES[dtype]).reshape(1, 256, 1, 256)
    _, lse = decode8(q, every, zeros, scale=1.0, return_lse=True)
    np.testing.assert_allclose(to_host(lse)[0, :, 0], every.numbers[0, 0, 0], rtol=1e-6)
