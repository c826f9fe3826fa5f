"""Races for times: of graph replays or of calls, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cufa.explorer import race
from cufa.explorer.clock import Call, Clock, Reading
from cufa.explorer.race import Name

Capture = Callable[[Call, int], Call]
"""Captures a number of calls and returns a call that replays them; raises `CaptureError`."""

_EMPTY = 0.01
"""Part of the time of a burst of calls. A replay that takes less has captured none of them. On a
busy host, calls may take 20 times as long as their work on the GPU, which is all that a replay
does."""


class CaptureError(RuntimeError):
    """The calls of a contestant cannot be captured in a graph."""


class Race(race.Race[Name]):
    """A race whose contestants may be timed by replays of captured bursts, within a budget."""

    def __init__(self, calls: Mapping[Name, Call], clock: Clock, burst_ms: float = 4.0) -> None:
        super().__init__(calls, clock, burst_ms)
        self._replays: dict[Name, Call] = {}

    def replay(self, capture: Capture) -> dict[Name, str]:
        """From now on, time replays of bursts that are captured once: the host's time is nobody's.

        Returns
        -------
        dict of hashable to str
            The contestants whose calls are timed as before, and why.
        """
        self.estimate()
        # A first call may have had something to set up, and would look far too long.
        for name, ms in self._group(dict.fromkeys(self.running, 1)).items():
            self.first_ms[name] = min(self.first_ms[name], ms)
        self.busy_ms = 0.0
        complaints = {}
        for name in self.running:
            calls = self._burst_calls(name)
            try:
                replay = capture(self._calls[name], calls)
            except CaptureError as error:
                complaints[name] = str(error)
                continue
            if self._clock.burst(replay, 1)() < _EMPTY * calls * self.first_ms[name]:
                complaints[name] = "nothing was captured"
            else:
                self._replays[name] = replay
        return complaints

    def _burst(self, name: Name, calls: int) -> Reading:
        if name not in self._replays:
            return super()._burst(name, calls)
        reading = self._clock.burst(self._replays[name], 1)
        return lambda: reading() / calls

    def run(self, budget: Budget) -> None:
        """Take as many rounds as a budget has, and samples of each contestant as it allows."""
        self.estimate()
        samples = {
            name: budget.samples(self.first_ms[name], self._burst_calls(name))
            for name in self.running
        }
        for index in range(budget.rounds):
            self.round([n for n in self.running if takes_part(samples[n], index, budget.rounds)])


def takes_part(samples: int, index: int, rounds: int) -> bool:
    """Whether a contestant with `samples` of them runs in round `index`; evenly spread."""
    return (index + 1) * samples // rounds > index * samples // rounds


class Budget(NamedTuple):
    """How long a race for times may take.

    Attributes
    ----------
    rounds : int
        The most samples of a contestant.
    burst_ms : float
        As in `Race`.
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

    def samples(self, call_ms: float, calls: int) -> int:
        """Return the samples of a contestant by the time of a call, and the calls of a burst."""
        if call_ms >= self.long_ms:
            return 0
        affordable = int(self.contestant_ms / (calls * max(call_ms, 1e-3)))
        return min(self.rounds, max(self.least, affordable))


def medians(
    calls: Mapping[Name, Call], clock: Clock, budget: Budget | None = None
) -> dict[Name, float]:
    """Time contestants against each other and return the median milliseconds of each.

    All take turns in every round, in another order each time; slow ones are sampled in fewer of
    the rounds, evenly spread.

    Parameters
    ----------
    calls : mapping of hashable to callable
        The contestants by name; each has been called before, so that nothing is compiled here.
    clock : Clock
    budget : Budget, optional
    """
    budget = budget or Budget()
    race = Race(calls, clock, budget.burst_ms)
    race.run(budget)
    return {name: race.median(name) for name in calls}
