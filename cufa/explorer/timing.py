"""Time contestants on the GPU: short bursts of each, interleaved round by round, and medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

Call = Callable[[], Any]
"""Queues one call of a contestant on the current stream and returns its result."""

Reading = Callable[[], float]
"""Waits for a burst that was queued and returns its milliseconds a call."""


REST_S = 0.02
"""A pause between rounds that keeps a card below its power limit."""

Name = TypeVar("Name")


class Clock(Protocol):
    """What a race needs of a device."""

    def burst(self, call: Call, calls: int) -> Reading:
        """Queue `calls` calls between two time stamps."""

    def rest(self) -> None:
        """Let the device cool between two rounds."""


class Sampling(NamedTuple):
    """How one contestant is sampled: `calls` a burst, in `rounds` of the rounds."""

    calls: int
    rounds: int


class Budget(NamedTuple):
    """How long a cell may take.

    Attributes
    ----------
    rounds : int
        Rounds of a cell, the most samples of a contestant.
    burst_ms : float
        Wanted length of a burst: long beside the resolution of events, short enough for the
        clocks to hold.
    contestant_ms : float
        Time that a contestant may take in all rounds together.
    least : int
        Samples that every contestant gets, whatever it takes ...
    long_ms : float
        ... unless one call takes this long: then the first timed call is its only sample.
    """

    rounds: int = 13
    burst_ms: float = 6.0
    contestant_ms: float = 400.0
    least: int = 3
    long_ms: float = 1000.0

    def sampling(self, call_ms: float) -> Sampling:
        """Return how to sample a contestant whose call takes about `call_ms`."""
        call_ms = max(call_ms, 1e-3)
        if call_ms >= self.long_ms:
            return Sampling(1, 0)
        calls = min(200, max(1, round(self.burst_ms / call_ms)))
        rounds = int(self.contestant_ms / (calls * call_ms))
        return Sampling(calls, min(self.rounds, max(self.least, rounds)))


def takes_part(sampled: int, index: int, rounds: int) -> bool:
    """Whether a contestant with `sampled` samples runs in round `index`; evenly spread."""
    return (index + 1) * sampled // rounds > index * sampled // rounds


def order_of(names: Sequence[Name], index: int) -> list[Name]:
    """Return the order of round `index`: rotated every second round, and reversed in between.

    Long steps of the rotation bring each contestant to other places within few rounds.
    """
    names = list(names)
    step = round(0.618 * len(names))
    shift = index // 2 * step % len(names) if names else 0
    rotated = names[shift:] + names[:shift]
    return rotated[::-1] if index % 2 else rotated


def race(calls: Mapping[str, Call], clock: Clock, budget: Budget) -> dict[str, float]:
    """Time contestants against each other and return the median milliseconds of each.

    Parameters
    ----------
    calls : mapping of str to callable
        The contestants; each has been called before, so that nothing is compiled here.
    clock : Clock
        Time stamps of the device.
    budget : Budget
        Rounds and times.

    Returns
    -------
    dict of str to float
        Milliseconds a call, the median over rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    sampling: dict[str, Sampling] = {}
    for name, call in calls.items():
        estimate = clock.burst(call, 1)()
        sampling[name] = budget.sampling(estimate)
        if not sampling[name].rounds:
            samples[name].append(estimate)
    for index in range(budget.rounds):
        # All bursts of a round are queued before the first is waited for, so that the host's
        # own time falls behind the device's.
        readings = [
            (name, clock.burst(calls[name], sampling[name].calls))
            for name in order_of(list(calls), index)
            if takes_part(sampling[name].rounds, index, budget.rounds)
        ]
        for name, reading in readings:
            samples[name].append(reading())
        if readings:
            clock.rest()
    return {name: statistics.median(values) for name, values in samples.items()}


class CudaClock:
    """CUDA events on CuPy's current stream.

    Before each burst a buffer larger than the L2 cache is written: every contestant then starts
    with the same cold cache, and the host is some calls ahead when the burst begins.

    Parameters
    ----------
    rest_s : float
        Pause between rounds, which keeps the card below its power limit.
    flush_bytes : int
        Size of that buffer.
    every_call : bool
        Whether to write it before every call of a burst, outside the time that is taken: for calls
        that are bound by memory, which would find their operands in L2 after the first.
    """

    def __init__(
        self, rest_s: float = REST_S, flush_bytes: int = 512 << 20, every_call: bool = False
    ) -> None:
        import cupy

        self._cupy = cupy
        self._rest_s = rest_s
        self._every_call = every_call
        self._scratch = cupy.empty(flush_bytes, dtype=cupy.int8)

    def burst(self, call: Call, calls: int) -> Reading:
        """Queue `calls` calls between events; the reading waits for the last one."""
        event = self._cupy.cuda.Event
        parts = (calls, 1) if self._every_call else (1, calls)
        spans = []
        for _ in range(parts[0]):
            start, stop = event(), event()
            self._scratch.data.memset_async(0, self._scratch.nbytes)
            start.record()
            for _ in range(parts[1]):
                call()
            stop.record()
            spans.append((start, stop))

        def reading() -> float:
            spans[-1][1].synchronize()
            elapsed = self._cupy.cuda.get_elapsed_time
            return sum(float(elapsed(start, stop)) for start, stop in spans) / calls

        return reading

    def rest(self) -> None:
        """Sleep."""
        time.sleep(self._rest_s)
