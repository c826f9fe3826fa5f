"""Rounds of interleaved samples, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from cufa.explorer.timing import Call, Clock, order_of

Name = TypeVar("Name", bound=Hashable)


class Effort(NamedTuple):
    """How much a race measures.

    Attributes
    ----------
    screens : tuple of float
        A round of all that are left for each; then those leave that take so many times the best.
    settle_rounds : int
        Rounds of those that passed, at most ...
    settled : float
        ... until the spread of all leaders is below this.
    close : float
        Leaders are within so many times the best.
    final_rounds : int
        Rounds of the leaders alone.
    least : int
        Rounds that settling and the final get even where time is up.
    burst_ms : float
        Wanted length of a burst: long beside the resolution of events.
    group_ms : float
        Time after which the card may rest, so that it stays below its power limit.
    busy_s : float
        Time of the card for all rounds, beyond the single call that all begin with.
    """

    screens: tuple[float, ...] = (1.5, 1.2, 1.2)
    settle_rounds: int = 12
    settled: float = 0.01
    close: float = 1.03
    final_rounds: int = 16
    least: int = 3
    burst_ms: float = 4.0
    group_ms: float = 40.0
    busy_s: float = 12.0


class Time(NamedTuple):
    """Milliseconds a call, and the relative interquartile range of its samples (None of one)."""

    ms: float
    spread: float | None


_MOST_CALLS = 200  # of a burst
_FIRST_GROUP = 8  # contestants, before anyone's time is known


class Rounds(Generic[Name]):
    """Interleaved samples of contestants, all those of a round under the same conditions.

    Parameters
    ----------
    calls : mapping of hashable to callable
        The contestants; each has run before.
    clock : Clock
    effort : Effort

    Attributes
    ----------
    first_ms : dict
        A single call of each.
    samples : dict of dict
        Of each contestant, milliseconds a call by the number of the round.
    busy_ms : float
        Time of the card since the estimates, without the flushes of its cache.
    """

    def __init__(self, calls: Mapping[Name, Call], clock: Clock, effort: Effort) -> None:
        self._calls = calls
        self._clock = clock
        self._effort = effort
        self._rounds = 0
        self.first_ms: dict[Name, float] = {}
        self.samples: dict[Name, dict[int, float]] = {name: {} for name in calls}
        self.busy_ms = 0.0

    def estimate(self) -> None:
        """Time a single call of each."""
        names = list(self._calls)
        for first in range(0, len(names), _FIRST_GROUP):
            group = names[first : first + _FIRST_GROUP]
            self.first_ms.update(self._group([(name, 1) for name in group]))
        self.busy_ms = 0.0

    def run(self, names: Sequence[Name]) -> None:
        """Take a sample of each; estimates are there."""
        group: list[tuple[Name, int]] = []
        group_ms = 0.0
        found: dict[Name, float] = {}
        for name in order_of(names, self._rounds):
            call_ms = max(self.first_ms[name], 1e-3)
            calls = min(_MOST_CALLS, max(1, round(self._effort.burst_ms / call_ms)))
            group.append((name, calls))
            group_ms += calls * call_ms
            if group_ms >= self._effort.group_ms:
                found.update(self._group(group))
                group, group_ms = [], 0.0
        found.update(self._group(group))
        for name, ms in found.items():
            self.samples[name][self._rounds] = ms
        self._rounds += 1

    def _group(self, group: list[tuple[Name, int]]) -> dict[Name, float]:
        """Queue a burst of each, so that the host's time falls behind the card's, and wait."""
        bursts = [(name, n, self._clock.burst(self._calls[name], n)) for name, n in group]
        found = {}
        for name, calls, reading in bursts:
            found[name] = reading()
            self.busy_ms += found[name] * calls
        if group:
            self._clock.rest()
        return found

    def median(self, name: Name) -> float:
        """Return the median of a contestant's samples, or its single call."""
        samples = self.samples[name].values()
        return statistics.median(samples) if samples else self.first_ms[name]

    def spread(self, name: Name) -> float | None:
        """Return the relative interquartile range of a contestant's samples."""
        samples = list(self.samples[name].values())
        if len(samples) < 2:
            return None
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return (high - low) / middle

    def ratio(self, name: Name, other: Name) -> float:
        """Return a contestant's time by another's: the median over the rounds that both ran.

        The card's clocks move within seconds; within a round they are nearly the same for all.
        """
        ours, theirs = self.samples[name], self.samples[other]
        ratios = [ms / theirs[i] for i, ms in ours.items() if i in theirs]
        if ratios:
            return statistics.median(ratios)
        return self.first_ms[name] / self.first_ms[other]
