"""Races of many contestants: screen all, settle those that are near, time the leaders again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple

from cufa.explorer.rounds import Effort, Name, Rounds, Time
from cufa.explorer.timing import Call, Clock

_HOPELESS = 2.0  # times the best, by a single call
_WARM_UP_MS = 500.0
_WARM_UP_ROUNDS = 100  # at most: short calls leave the card idle for part of the time


class Race(Generic[Name]):
    """Finds the fastest of many.

    Parameters
    ----------
    calls : mapping of hashable to callable
        The contestants; each has run before.
    clock : Clock
    effort : Effort, optional
    """

    def __init__(
        self, calls: Mapping[Name, Call], clock: Clock, effort: Effort | None = None
    ) -> None:
        self._effort = effort or Effort()
        self._rounds = Rounds(calls, clock, self._effort)
        self._running = list(calls)

    def times(self) -> dict[Name, Time]:
        """Return the time of each that has been timed until now, comparable among all.

        Contestants that left early were timed under conditions of their own. So all are measured
        against one that is still running: its median, by their ratio to it in the same rounds.
        """
        rounds = self._rounds
        timed = list(rounds.first_ms)
        running = [name for name in self._running if name in rounds.first_ms]
        if not running:
            return {}
        anchor = min(running, key=rounds.median)
        scale = rounds.median(anchor)
        return {
            name: Time(scale * rounds.ratio(name, anchor), rounds.spread(name)) for name in timed
        }

    def run(self, on_done: Callable[[Name, Time], None]) -> None:
        """Race; `on_done` is called with each contestant when it leaves, or at the end."""
        if not self._running:
            return
        self._rounds.estimate()
        self._drop(_HOPELESS, on_done)
        for limit in self._effort.screens:
            self._rounds.run(self._running)
            self._drop(limit, on_done)
        last_screen = self._effort.screens[-1]
        # Settling leaves a third of the time to the final.
        for index in range(self._effort.settle_rounds):
            if index >= self._effort.least and (self._settled() or self._spent(2 / 3)):
                break
            self._rounds.run(self._running)
            self._drop(last_screen, on_done)
        self._drop(self._effort.close, on_done)
        if len(self._running) > 1:
            for index in range(self._effort.final_rounds):
                if index >= self._effort.least and self._spent(1.0):
                    break
                self._rounds.run(self._running)
        times = self.times()
        for name in self._running:
            on_done(name, times[name])

    def _drop(self, limit: float, on_done: Callable[[Name, Time], None]) -> None:
        times = self.times()
        most = limit * min(times[name].ms for name in self._running)
        dropped = [name for name in self._running if times[name].ms > most]
        self._running = [name for name in self._running if times[name].ms <= most]
        for name in dropped:
            on_done(name, times[name])

    def _settled(self) -> bool:
        times = self.times()
        best = min(times[name].ms for name in self._running)
        leaders = [
            times[name] for name in self._running if times[name].ms <= self._effort.close * best
        ]
        return all(
            time.spread is not None and time.spread < self._effort.settled for time in leaders
        )

    def _spent(self, share: float) -> bool:
        return self._rounds.busy_ms > 1e3 * share * self._effort.busy_s


class Duel(NamedTuple):
    """Milliseconds of two contestants, and how many times as fast the second is."""

    first_ms: float
    second_ms: float
    ratio: float


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
    warm_up = Rounds(calls, clock, Effort())
    warm_up.estimate()
    for _ in range(_WARM_UP_ROUNDS):
        warm_up.run(list(calls))
        if warm_up.busy_ms >= _WARM_UP_MS:
            break
    found = Rounds(calls, clock, Effort())
    found.estimate()
    for _ in range(rounds):
        found.run(list(calls))
    return Duel(found.median("first"), found.median("second"), found.ratio("first", "second"))
