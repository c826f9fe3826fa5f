"""The fastest of many: a race in which those that cannot win leave early."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cufa.explorer.race import Name, Race, Time


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
