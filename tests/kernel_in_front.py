"""The kernel in front of a launch of `decode` that has begun already: what it still writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from played_decode import arrays_beside
from played_gpu import at, elements
from reference import DTYPES

from cufa.launch.decode import dtype_of
from cufa.variant import Variant

_INT32 = np.dtype(np.int32)


def kernel_in_front(variant: Variant, address: int, rng: np.random.Generator) -> Iterator[bool]:
    """Write what the launch with the parameter at an address reads, a step each time.

    The first leaves other lengths and pages there, and NaN for Q, K, V and arrays beside them. The
    others make each what it was, in any order.
    """
    paged = variant.kv != "Contiguous"
    layout = dtype_of(variant)
    parameter = at(address, (1,), (layout.itemsize,), layout)[0]
    p = parameter["params"]
    batch, heads, capacity = (int(p[name]) for name in ("batch", "heads_kv", "seq_kv"))
    d, dv = int(p["head_dim"]), int(p["head_dim_v"])
    integers, blocks, keys = [], batch, capacity
    if p["lengths"]:
        integers.append((at(int(p["lengths"]), (batch,), (4,), _INT32), capacity))
    if paged:
        kv = parameter["kv"]
        blocks, keys = int(kv["pages"]), int(kv["page_size"]["divisor"])
        strides = 4 * int(kv["table_stride"]), 4
        table = at(int(kv["block_table"]), (batch, capacity // keys), strides, _INT32)
        integers.append((table, blocks - 1))
    writes: list[tuple[np.ndarray, tuple[int, ...], Any]] = []
    for array, most in integers:
        writes += [(array, place, value) for place, value in np.ndenumerate(array)]
        array[...] = _others(rng, array, most)
    floats = list(arrays_beside(variant, parameter).values())
    for name, shape in (
        ("q", (batch, int(p["heads_q"]), int(p["seq_q"]), d)),
        ("k", (blocks, heads, keys, d)),
        ("v", (blocks, heads, keys, dv)),
    ):
        floats.append(elements(p[name], shape, DTYPES[variant.dtype]))
    for numbers in floats:
        writes.append((numbers, (), numbers.copy()))
        numbers[...] = np.nan
    yield True
    for i in rng.permutation(len(writes)):
        array, place, value = writes[i]
        array[place] = value
        yield True


def _others(rng: np.random.Generator, array: np.ndarray, most: int) -> np.ndarray:
    """Return other numbers: each as it may be before a step, by chance or by mistake, or all so."""
    any_legal = rng.integers(0, most + 1, array.shape)
    kinds: list[Any] = [
        array,
        array - 1,
        array * 7 // 10,
        array // 2 + 3,
        any_legal,
        0,
        -5,
        2**31 - 1,
    ]
    chosen = rng.integers(len(kinds), size=array.shape if rng.random() < 0.5 else 1)
    return np.choose(chosen, kinds)
