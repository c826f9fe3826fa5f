"""Host cost: from the Python call to the launched kernel, for one small problem."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any, NamedTuple

import cupy

from benchmarks.cells import Cell
from benchmarks.contestants import planned
from benchmarks.inputs import Operands
from cufa.explorer.clock import Call
from cufa.explorer.race import order_of

CELL = Cell("bfloat16", 1, 8, 8, 128, 128, 64, 64, False)

CALLS = 50
"""Calls between two synchronisations: few enough that the launch queue never fills."""

BATCHES = 60

_TRIVIAL = 'extern "C" __global__ void trivial(float* x) { if (x == nullptr) x[0] = 0.f; }'


class Contestant(NamedTuple):
    """A call, and what surrounds a batch of it outside the timed part."""

    call: Call
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def rows(kernel: str | None) -> list[dict[str, Any]]:
    """Return the one row of the host benchmark.

    Every call is timed on its own by the host's clock, without a synchronisation between calls;
    contestants take turns by batches. The figure is the median over all calls.

    Parameters
    ----------
    kernel : str or None
        The kernel forced on cufa; None leaves the choice to it.
    """
    operands = Operands(CELL, cupy.random.default_rng(0))
    contestants = _contestants(operands, kernel)
    for contestant in contestants.values():
        _batch(contestant)
    times: dict[str, list[int]] = {name: [] for name in contestants}
    for index in range(BATCHES):
        for name in order_of(list(contestants), index):
            times[name] += _batch(contestants[name])
    medians = {name: round(statistics.median(ns) / 1e3, 2) for name, ns in times.items()}
    print(f"{CELL}: " + " ".join(f"{name} {us}" for name, us in medians.items()), flush=True)
    return [
        {
            **CELL.row(),
            "kernel": planned(operands, kernel).kernel,
            "unit": "us",
            "cufa": medians.pop("cufa"),
            "peers": medians,
        }
    ]


def _contestants(operands: Operands, kernel: str | None) -> dict[str, Contestant]:
    import cufa

    q, k, v = operands.q, operands.k, operands.v
    out = cupy.empty_like(q)
    trivial = cupy.RawKernel(_TRIVIAL, "trivial")
    word = cupy.zeros(1, dtype=cupy.float32)

    def floor() -> Any:
        result = cupy.empty(q.shape, dtype=q.dtype)
        trivial((1,), (32,), (word,))
        return result

    contestants = {
        "cufa": Contestant(lambda: cufa.attention(q, k, v, kernel=kernel)),
        "cufa_out": Contestant(lambda: cufa.attention(q, k, v, out=out, kernel=kernel)),
        "floor": Contestant(floor),
    }
    try:
        contestants |= _torch_contestants(operands)
    except ImportError as error:
        print(f"sdpa is not here: {error}", file=sys.stderr, flush=True)
    return contestants


def _torch_contestants(operands: Operands) -> dict[str, Contestant]:
    """Return SDPA choosing its backend by itself, and with the choice made outside the loop."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = operands.torch()

    def call() -> Any:
        return scaled_dot_product_attention(q, k, v)

    return {
        "sdpa": Contestant(call),
        "sdpa_fa2": Contestant(call, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    }


def _batch(contestant: Contestant) -> list[int]:
    """Return the nanoseconds of each of `CALLS` calls."""
    call = contestant.call
    times = []
    with contestant.around():
        cupy.cuda.Device().synchronize()
        for _ in range(CALLS):
            start = perf_counter_ns()
            call()
            times.append(perf_counter_ns() - start)
        cupy.cuda.Device().synchronize()
    return times
