"""The kernel in front of a launch that has begun already: what it still writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from guarded import memory_around
from played_gpu import at

from cufa.features.parts import BLOCKS
from cufa.specs import KERNELS, quantize
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant

_INT32, _WORD = np.dtype(np.int32), np.dtype(np.uint64)

Integers = tuple[np.ndarray, int]
"""Lengths, or the like, and what they can be at most."""


def kernel_in_front(
    variant: Variant | Instance, address: int, nbytes: int, rng: np.random.Generator
) -> Iterator[bool]:
    """Write what the launch with the parameter at an address reads or writes, a step each time.

    The first leaves other lengths, offsets, pages and numbers of tiles there, and NaN, or all bits,
    in the memory of all else whose address is in the parameter. The others make each what it was,
    in any order. A launch of `quantize` that overlaps depends on nothing of the launch in front.
    """
    if variant.kernel == quantize.SPEC.name:
        layout = quantize.SPEC.params
        if at(address, (1,), (layout.itemsize,), layout)[0]["overlaps"]:
            yield True
            return
    integers: list[Integers] = []
    lists = 0  # where they are; bits that are all set would lead out of them
    if isinstance(variant, Variant):
        decodes = KERNELS[variant.kernel].decodes
        layout = variant.parameter
        parameter = at(address, (1,), (layout.itemsize,), layout)[0]
        integers = list((_of_decode if decodes else _of_attention)(variant, parameter))
        lists = int(parameter[BLOCKS]["block_mask_data"]) if BLOCKS in variant.score else 0
    others = {array.ctypes.data for array, _ in integers}
    memories: dict[int, np.ndarray] = {}
    for word in at(address, (nbytes // 8,), (8,), _WORD).tolist():
        memory = None if word in others else memory_around(word)
        if memory is not None:
            memories[memory.ctypes.data] = memory
    # All that there is, before anything changes: two arrays may be one.
    writes: list[tuple[np.ndarray, Any, Any]] = [
        (array, place, value) for array, _ in integers for place, value in np.ndenumerate(array)
    ]
    for memory in memories.values():
        for piece in np.array_split(memory, rng.integers(1, 4)):
            writes.append((piece, ..., piece.copy()))
    for array, most in integers:
        array[...] = _others(rng, array, most)
    for start, memory in memories.items():
        memory[...] = 0 if start == lists else 0xFF
    yield True
    for i in rng.permutation(len(writes)):
        array, place, value = writes[i]
        array[place] = value
        yield True


def _of_decode(variant: Variant, parameter: np.void) -> Iterator[Integers]:
    """Yield the lengths and the block table of a launch of `decode`."""
    p = parameter["params"]
    batch, capacity = int(p["batch"]), int(p["seq_kv"])
    if p["lengths"]:
        yield _row(p["lengths"], batch), capacity
    if variant.kv != "Contiguous":
        kv = parameter["kv"]
        strides = 4 * int(kv["table_stride"]), 4
        shape = batch, capacity // int(kv["page_size"]["divisor"])
        yield at(int(kv["block_table"]), shape, strides, _INT32), int(kv["pages"]) - 1


def _of_attention(variant: Variant, parameter: np.void) -> Iterator[Integers]:
    """Yield the lengths or offsets of a launch of `attention`, and how many tiles are drawn."""
    p = parameter["params"]
    queries, keys = int(p["seq_q"]), int(p["seq_kv"])
    if p["tiles_drawn"]:
        yield _row(p["tiles_drawn"], 1), int(p["heads"]) * int(p["q_tiles"])
    if variant.kv == "Padded":
        batch = int(p["heads"]) // int(p["heads_q"])
        for name, most in (("lengths_k", keys), ("lengths_q", queries)):
            if parameter["kv"][name]:
                yield _row(parameter["kv"][name], batch), most
    if variant.kv == "Varlen":
        kv = parameter["kv"]
        sequences = int(kv["sequences"])
        yield _row(kv["cu_seqlens_q"], sequences + 1), queries
        yield _row(kv["cu_seqlens_k"], sequences + 1), keys
        if kv["seqused_k"]:
            yield _row(kv["seqused_k"], sequences), keys


def _row(address: Any, count: int) -> np.ndarray:
    return at(int(address), (count,), (4,), _INT32)


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
