"""Host cost of decoding: one new query and a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np

import cufa
from benchmarks.cells import Cell
from benchmarks.host_clock import Batch
from benchmarks.inputs import Operands, to_torch
from cufa.explorer.clock import Call

DECODE_CASES = ("decode", "decode_new_lengths", "decode_paged", "append")

PAGE_SIZE = 16

Beside = Callable[[tuple[int, ...], Any, Callable[[], Call]], dict[str, Call]]
"""Shape and dtype of a result, and what makes SDPA's call -> the other contestants."""

ByName = Callable[[Iterator[dict[str, Call]]], dict[str, list[Call]]]
"""The contestants of each call -> the calls of each contestant."""


class DecodeCases:
    """The cases, and their contestants.

    Parameters
    ----------
    calls : int
        Calls of a batch.
    batches : int
    beside, by_name : callable
    """

    def __init__(self, calls: int, batches: int, beside: Beside, by_name: ByName) -> None:
        self._calls, self._steps = calls, calls * batches
        self._beside, self._by_name = beside, by_name

    def cases(self) -> dict[str, tuple[Cell, Batch]]:
        """Return the cell of each case, whose lengths are the largest, and its batches."""
        cell = Cell("bfloat16", 1, 32, 8, 1, 4096, 128, 128, False)
        batches = (
            self._same(cell, paged=False),
            self._new_lengths(cell),
            self._same(cell, paged=True),
            self._append(cell),
        )
        return {name: (cell, batch) for name, batch in zip(DECODE_CASES, batches, strict=True)}

    def _contestants(self, ours: Call, q: Any, k: Any, v: Any) -> dict[str, Call]:
        """Return a call of each, SDPA's on the same keys in one piece."""
        return {"cufa": ours, **self._beside(q.shape, q.dtype, lambda: _sdpa(q, k, v))}

    def _same(self, cell: Cell, paged: bool) -> Batch:
        """Return batches of one call, again and again."""
        x = Operands(cell, cupy.random.default_rng(0))
        lengths = _int32([cell.sk])
        caches, table = (x.k, x.v), None
        if paged:
            pages = cell.sk // PAGE_SIZE
            shape = (pages, cell.hk, PAGE_SIZE)
            caches = tuple(each.reshape((*shape, each.shape[3])) for each in caches)
            table = _int32([range(pages)])

        def ours() -> Any:
            return cufa.decode(x.q, *caches, lengths=lengths, block_table=table)

        calls = self._contestants(ours, x.q, x.k, x.v)
        return lambda: {name: [call] * self._calls for name, call in calls.items()}

    def _new_lengths(self, cell: Cell) -> Batch:
        """Return batches of calls with other lengths each, which are on the device."""
        x = Operands(cell, cupy.random.default_rng(0))
        filled = iter(range(1, cell.sk + 1))

        def contestants(n: int) -> dict[str, Call]:
            lengths = _int32([n])
            return self._contestants(
                lambda: cufa.decode(x.q, x.k, x.v, lengths=lengths),
                *(x.q, x.k[:, :, :n], x.v[:, :, :n]),
            )

        return lambda: self._by_name(contestants(next(filled)) for _ in range(self._calls))

    def _append(self, cell: Cell) -> Batch:
        """Return batches of steps: a token is appended, and a query decoded."""
        x = Operands(cell, cupy.random.default_rng(0))
        k, v = x.k[:, :, :1].copy(), x.v[:, :, :1].copy()
        cache = cufa.KVCache(cell.b, cell.hk, self._steps, cell.d, dtype=cell.dtype, xp=cupy)
        filled = iter(range(self._steps))

        def ours() -> Any:
            cache.append(k, v)
            return cache.decode(x.q)

        def contestants(n: int) -> dict[str, Call]:
            def theirs() -> Call:
                at = slice(n, n + 1)
                parts = [
                    (to_torch(to[:, :, at]), to_torch(new)) for to, new in ((x.k, k), (x.v, v))
                ]
                attend = _sdpa(x.q, x.k[:, :, : n + 1], x.v[:, :, : n + 1])

                def step() -> Any:
                    for to, new in parts:
                        to.copy_(new)
                    return attend()

                return step

            return {"cufa": ours, **self._beside(x.q.shape, x.q.dtype, theirs)}

        return lambda: self._by_name(contestants(next(filled)) for _ in range(self._calls))


def _int32(values: Any) -> Any:
    """Return an array on the device."""
    return cupy.asarray(np.array(values, np.int32))


def _sdpa(q: Any, k: Any, v: Any) -> Call:
    """Return SDPA's call on CuPy arrays."""
    from torch.nn.functional import scaled_dot_product_attention

    tensors = [to_torch(x) for x in (q, k, v)]
    return lambda: scaled_dot_product_attention(*tensors, enable_gqa=True)
