"""Time of a call on the host: calls timed one by one until they return, in turns by batches."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import cupy

from benchmarks.calls import Chosen
from cufa.explorer.clock import Call
from cufa.explorer.race import order_of

WARM = 4
"""Batches before, of which nothing is counted."""

Batch = Callable[[], Mapping[str, Sequence[Call]]]
"""Returns the calls of a batch by contestant, made before the clock runs."""


def medians(
    batch: Batch,
    batches: int,
    synchronize: Callable[[], Any] = lambda: cupy.cuda.Device().synchronize(),
) -> dict[str, float]:
    """Return the microseconds of a call, by contestant.

    Parameters
    ----------
    batch : callable
        Called for each round. A choice that all its calls share is made once for a batch.
    batches : int
        Batches that count, after those that warm up.
    synchronize : callable
        Waits for the GPU.
    """
    times: dict[str, list[int]] = {}
    gc.collect()
    gc.disable()  # nothing is collected meanwhile
    try:
        for index in range(-WARM, batches):
            calls = batch()
            for name in order_of(list(calls), index):
                found = _timed(calls[name], synchronize)
                if index >= 0:
                    times.setdefault(name, []).extend(found)
    finally:
        gc.enable()
    return {name: round(statistics.median(ns) / 1e3, 2) for name, ns in times.items()}


def _timed(calls: Sequence[Call], synchronize: Callable[[], Any]) -> list[int]:
    """Return the nanoseconds of each call."""
    first = calls[0]
    choice = first.choice if isinstance(first, Chosen) else contextlib.nullcontext
    calls = [call.call if isinstance(call, Chosen) else call for call in calls]
    times = []
    with choice():
        synchronize()
        for call in calls:
            start = perf_counter_ns()
            call()
            times.append(perf_counter_ns() - start)
        synchronize()
    return times
