"""Host cost: from the Python call to the launched kernel, for small problems."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import cupy

from benchmarks.calls import Chosen
from benchmarks.cells import Cell
from benchmarks.contestants import planned, say
from benchmarks.fp8 import quantized
from benchmarks.host_clock import WARM, Batch, medians
from benchmarks.host_decode import DECODE_CASES, DecodeCases
from benchmarks.inputs import Operands, to_torch
from cufa import device as devices
from cufa.explorer.clock import Call
from cufa.specs import FP8_KERNELS

CALLS = 50
"""Calls between two synchronisations: few enough that the launch queue never fills."""

BATCHES = 60

CASES_IN_8_BITS = "fp8", "from_16_bits"
FP8 = "fp8_wgmma"

LONGEST = 512
"""The longest of the new lengths."""

_POOL_BYTES = 256 << 20  # results of any length are parts of it
_TRIVIAL = 'extern "C" __global__ void trivial(float* x) { if (x == nullptr) x[0] = 0.f; }'

DEFAULT = "sdpa_default"
"""SDPA choosing its backend in each call."""


def rows(kernel: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of the host benchmark, one a case.

    Every call is timed on its own by the host's clock, without a synchronisation between calls;
    contestants take turns by batches. The figure is the median over all calls.

    Parameters
    ----------
    kernel : str or None
        The kernel forced on cufa; None leaves the choice to it.
    """
    cupy.empty(_POOL_BYTES, dtype=cupy.uint8)  # freed at once, and kept by CuPy's pool
    bench = _Bench(kernel)
    for case, (cell, batch) in bench.cases().items():
        figures = medians(batch, BATCHES)
        print(f"{case}: " + " ".join(f"{name} {us}" for name, us in figures.items()), flush=True)
        yield {
            "case": case,
            **cell.row(),
            "kernel": _kernel_of(case, cell, kernel),
            "unit": "us",
            "cufa": figures.pop("cufa"),
            "peers": figures,
        }


def _kernel_of(case: str, cell: Cell, kernel: str | None) -> str:
    if case in DECODE_CASES:
        return "decode"
    if case in CASES_IN_8_BITS:
        return FP8
    return planned(Operands(cell, cupy.random.default_rng(0)), kernel).kernel


class FreshLengths:
    """Numbers of queries and of keys that no earlier draw has given."""

    def __init__(self, longest: int, seed: int = 0) -> None:
        self._longest = longest
        self._rng = random.Random(seed)
        self._seen: set[tuple[int, int]] = set()

    def draw(self, count: int) -> list[tuple[int, int]]:
        """Return `count` pairs."""
        found: list[tuple[int, int]] = []
        while len(found) < count:
            pair = self._rng.randint(1, self._longest), self._rng.randint(1, self._longest)
            if pair not in self._seen:
                self._seen.add(pair)
                found.append(pair)
        return found


class _Bench:
    """The cases, and their contestants."""

    def __init__(self, kernel: str | None) -> None:
        import cufa

        self._attention, self._kernel = cufa.attention, kernel
        self._torch = True
        try:
            import torch  # noqa: F401
        except ImportError as error:
            say(f"sdpa is not here: {error}")
            self._torch = False
        self._trivial = cupy.RawKernel(_TRIVIAL, "trivial")
        self._word = cupy.zeros(1, dtype=cupy.float32)

    def cases(self) -> dict[str, tuple[Cell, Batch]]:
        """Return the cell of each case, whose lengths are the largest, and its batches."""
        cell = Cell("bfloat16", 1, 8, 8, 128, 128, 64, 64, False)
        largest = cell._replace(sq=LONGEST, sk=LONGEST)
        cache = cell._replace(sq=1, sk=(WARM + BATCHES) * CALLS)
        odd = cell._replace(d=59, dv=59)
        return {
            "same": (cell, self._same(cell)),
            "new_lengths": (largest, self._new_lengths(largest)),
            "growing_cache": (cache, self._growing_cache(cache)),
            "copied": (odd, self._same(odd)),
            "out": (cell, self._same(cell, into=True)),
            **self._cases_in_8_bits(cell),
            **self._decode_cases(),
        }

    def _cases_in_8_bits(self, cell: Cell) -> dict[str, tuple[Cell, Batch]]:
        """Return the cases in 8 bits: of quantized arrays, and of arrays that a call quantizes."""
        if self._kernel is not None:
            return {}
        if not FP8_KERNELS[FP8].runs_on(devices.current()):
            say(f"{FP8} is not for this GPU")
            return {}
        x = Operands(cell, cupy.random.default_rng(0))
        arrays, calls = quantized(x), self._calls(x.q, x.k, x.v)
        own: tuple[Call, ...] = (
            lambda: self._attention(*arrays, out_dtype=x.q.dtype),
            lambda: self._attention(x.q, x.k, x.v, precision="fp8"),
        )

        def batch(call: Call) -> Batch:
            return lambda: {name: [each] * CALLS for name, each in (calls | {"cufa": call}).items()}

        return {name: (cell, batch(x)) for name, x in zip(CASES_IN_8_BITS, own, strict=True)}

    def _decode_cases(self) -> dict[str, tuple[Cell, Batch]]:
        """Return those of `cufa.decode`, which no kernel of attention's can be forced on."""
        if self._kernel is not None:
            return {}
        return DecodeCases(CALLS, WARM + BATCHES, self._beside, _by_name).cases()

    def _calls(self, q: Any, k: Any, v: Any, out: Any = None) -> dict[str, Call]:
        """Return a call of each contestant; SDPA has no `out`, and makes its result."""
        attention, kernel = self._attention, self._kernel

        def sdpa() -> Call:
            from torch.nn.functional import scaled_dot_product_attention

            tensors = [to_torch(x) for x in (q, k, v)]
            return lambda: scaled_dot_product_attention(*tensors)

        return {
            "cufa": lambda: attention(q, k, v, out=out, kernel=kernel),
            **self._beside((*q.shape[:-1], v.shape[-1]), q.dtype, sdpa),
        }

    def _beside(
        self, shape: tuple[int, ...], dtype: Any, sdpa: Callable[[], Call]
    ) -> dict[str, Call]:
        """Return the floor of a call with such a result, and what SDPA's call is, if it is here.

        Its flash backend is the cheapest on the host.
        """
        trivial, word = self._trivial, self._word

        def floor() -> None:
            cupy.empty(shape, dtype=dtype)
            trivial((1,), (32,), (word,))

        calls: dict[str, Call] = {"floor": floor}
        if self._torch:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            calls[DEFAULT] = chosen = sdpa()
            calls["sdpa"] = Chosen(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), chosen)
        return calls

    def _same(self, cell: Cell, into: bool = False) -> Batch:
        """Return batches of one call, again and again."""
        x = Operands(cell, cupy.random.default_rng(0))
        calls = self._calls(x.q, x.k, x.v, cupy.empty_like(x.q) if into else None)
        return lambda: {name: [call] * CALLS for name, call in calls.items()}

    def _new_lengths(self, cell: Cell) -> Batch:
        """Return batches of calls with lengths that no contestant has seen."""
        lengths = FreshLengths(LONGEST)
        memory = Operands(cell, cupy.random.default_rng(0))

        def part(array: Any, seq: int) -> Any:
            shape = (1, array.shape[1], seq, array.shape[3])
            return array.ravel()[: shape[1] * shape[2] * shape[3]].reshape(shape)

        def batch() -> dict[str, list[Call]]:
            return _by_name(
                self._calls(part(memory.q, sq), part(memory.k, sk), part(memory.v, sk))
                for sq, sk in lengths.draw(CALLS)
            )

        return batch

    def _growing_cache(self, cell: Cell) -> Batch:
        """Return batches of calls with one query, and each with a key more than the last."""
        memory = Operands(cell, cupy.random.default_rng(0))
        filled = iter(range(1, cell.sk + 1))

        def batch() -> dict[str, list[Call]]:
            return _by_name(
                self._calls(memory.q, memory.k[:, :, :n], memory.v[:, :, :n])
                for n in (next(filled) for _ in range(CALLS))
            )

        return batch


def _by_name(calls: Iterator[dict[str, Call]]) -> dict[str, list[Call]]:
    """Turn the contestants of each call, all with new lengths, into the calls of each contestant.

    There is one of `DEFAULT`: cuDNN, where it is the choice, builds a graph for each length.
    """
    found: dict[str, list[Call]] = {}
    for each in calls:
        for name, call in each.items():
            found.setdefault(name, []).append(call)
    return {name: many[:1] if name == DEFAULT else many for name, many in found.items()}
