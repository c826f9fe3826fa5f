"""Races: contestants timed against each other in bursts that are interleaved round by round.

`duel` finds the faster of two. `knock_out` finds the fastest of many: those that cannot win leave
early.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from cufa.explorer.clock import Call, Clock, Reading

Name = TypeVar("Name", bound=Hashable)

_MOST_CALLS = 200  # of a burst
_FIRST_GROUP = 8  # contestants, before anyone's time is known
_GROUP_MS = 40.0  # after which the card may rest, so that it stays below its power limit


class Time(NamedTuple):
    """Milliseconds a call, and the relative interquartile range of its samples (None of one)."""

    ms: float
    spread: float | None


class Race(Generic[Name]):
    """Samples of contestants, those of one round under the same conditions.

    Parameters
    ----------
    calls : mapping of hashable to callable
        The contestants; each has run before, so that nothing is compiled here.
    clock : Clock
    burst_ms : float
        Wanted length of a burst: long against the resolution of events, short enough for the
        card's clocks to hold.

    Attributes
    ----------
    running : list
        The calls that take part, in the order of `calls`.
    first_ms : dict
        Milliseconds of a single call of each.
    samples : dict of dict
        Milliseconds a call of each, by the number of the round.
    busy_ms : float
        Time of the card since the single calls, without the flushes of its cache.
    """

    def __init__(self, calls: Mapping[Name, Call], clock: Clock, burst_ms: float = 4.0) -> None:
        self._calls = calls
        self._clock = clock
        self._burst_ms = burst_ms
        self._rounds = 0
        self.running = list(calls)
        self.first_ms: dict[Name, float] = {}
        self.samples: dict[Name, dict[int, float]] = {name: {} for name in calls}
        self.busy_ms = 0.0

    def estimate(self) -> None:
        """Time a single call of each, where that has not been done."""
        names = [name for name in self.running if name not in self.first_ms]
        for first in range(0, len(names), _FIRST_GROUP):
            group = names[first : first + _FIRST_GROUP]
            self.first_ms.update(self._group(dict.fromkeys(group, 1)))
            self.busy_ms = 0.0

    def round(self, names: Sequence[Name] | None = None) -> None:
        """Take a sample of some contestants, or of all that are running."""
        self.estimate()
        sampled: dict[Name, float] = {}
        group: dict[Name, int] = {}
        for name in order_of(self.running if names is None else names, self._rounds):
            group[name] = self._burst_calls(name)
            if sum(n * self.first_ms[each] for each, n in group.items()) >= _GROUP_MS:
                sampled.update(self._group(group))
                group = {}
        sampled.update(self._group(group))
        for name, ms in sampled.items():
            self.samples[name][self._rounds] = ms
        self._rounds += 1

    def _burst_calls(self, name: Name) -> int:
        return min(_MOST_CALLS, max(1, round(self._burst_ms / max(self.first_ms[name], 1e-3))))

    def _group(self, group: Mapping[Name, int]) -> dict[Name, float]:
        """Queue a burst of each, so that the host's time falls behind the card's, and wait."""
        bursts = {name: self._burst(name, calls) for name, calls in group.items()}
        ms = {name: reading() for name, reading in bursts.items()}
        self.busy_ms += sum(ms[name] * calls for name, calls in group.items())
        if group:
            self._clock.rest()
        return ms

    def _burst(self, name: Name, calls: int) -> Reading:
        return self._clock.burst(self._calls[name], calls)

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

    def times(self) -> dict[Name, Time]:
        """Return the time of each that has been timed until now, comparable among all.

        Contestants that left early were timed under conditions of their own. So all are measured
        against one that is still running: its median, by their ratio to it in the same rounds.
        """
        running = [name for name in self.running if name in self.first_ms]
        if not running:
            return {}
        anchor = min(running, key=self.median)
        scale = self.median(anchor)
        return {
            name: Time(scale * self.ratio(name, anchor), self.spread(name))
            for name in self.first_ms
        }


def order_of(names: Sequence[Name], index: int) -> list[Name]:
    """Return the order of round `index`: rotated every second round, and reversed in between.

    Long steps of the rotation bring each contestant to other places within few rounds.
    """
    names = list(names)
    step = round(0.618 * len(names))
    shift = index // 2 * step % len(names) if names else 0
    rotated = names[shift:] + names[:shift]
    return rotated[::-1] if index % 2 else rotated


class Duel(NamedTuple):
    """Milliseconds of two contestants, and how many times as fast the second is."""

    first_ms: float
    second_ms: float
    ratio: float


_WARM_UP_MS = 500.0
_WARM_UP_ROUNDS = 100  # at most: short calls leave the card idle for part of the time


def duel(first: Call, second: Call, clock: Clock, rounds: int = 40) -> Duel:
    """Time two contestants against each other in many rounds, after both have warmed the card up.

    Parameters
    ----------
    first, second : callable
        Each has run before.
    clock : Clock
        Without a rest: near the power limit, where programs run, another one may win.
    rounds : int
    """
    calls = {"first": first, "second": second}
    warm_up, race = Race(calls, clock), Race(calls, clock)
    for _ in range(_WARM_UP_ROUNDS):
        warm_up.round()
        if warm_up.busy_ms >= _WARM_UP_MS:
            break
    for _ in range(rounds):
        race.round()
    return Duel(race.median("first"), race.median("second"), race.ratio("first", "second"))


class Effort(NamedTuple):
    """How much a knock-out measures.

    Attributes
    ----------
    hopeless : float
        Contestants leave at once whose single call takes this many times the best.
    screens : tuple of float
        A round of all that are left for each; then those leave that take this many times the best.
    settle_rounds : int
        Rounds of those that passed, at most ...
    settled : float
        ... until the spread of all leaders is below this.
    close : float
        Leaders are within this many times the best.
    final_rounds : int
        Rounds of the leaders alone.
    least : int
        Rounds that settling and the final get even where time is up.
    busy_s : float
        Time of the card for all rounds, beyond the single call that all begin with.
    """

    hopeless: float = 2.0
    screens: tuple[float, ...] = (1.5, 1.2, 1.2)
    settle_rounds: int = 12
    settled: float = 0.01
    close: float = 1.03
    final_rounds: int = 16
    least: int = 3
    busy_s: float = 12.0


def knock_out(
    race: Race[Name], on_done: Callable[[Name, Time], None], effort: Effort | None = None
) -> None:
    """Find the fastest of many: screen all, settle those that are near, time the leaders again.

    Parameters
    ----------
    race : Race
        Its `times` are valid at any moment, also after an exception.
    on_done : callable
        Called with each contestant and its time when it leaves, or at the end.
    effort : Effort, optional
    """
    effort = effort or Effort()

    def drop(limit: float) -> None:
        times = race.times()
        most = limit * min(times[name].ms for name in race.running)
        for name in [name for name in race.running if times[name].ms > most]:
            race.running.remove(name)
            on_done(name, times[name])

    def settled() -> bool:
        times = [race.times()[name] for name in race.running]
        most = effort.close * min(time.ms for time in times)
        spreads = [time.spread for time in times if time.ms <= most]
        return all(spread is not None and spread < effort.settled for spread in spreads)

    def spent(share: float) -> bool:
        return race.busy_ms > 1e3 * share * effort.busy_s

    if not race.running:
        return
    race.estimate()
    drop(effort.hopeless)
    for limit in effort.screens:
        race.round()
        drop(limit)
    for index in range(effort.settle_rounds):
        # Settling leaves a third of the time to the final.
        if index >= effort.least and (settled() or spent(2 / 3)):
            break
        race.round()
        drop(effort.screens[-1])
    drop(effort.close)
    if len(race.running) > 1:
        for index in range(effort.final_rounds):
            if index >= effort.least and spent(1.0):
                break
            race.round()
    times = race.times()
    for name in race.running:
        on_done(name, times[name])
