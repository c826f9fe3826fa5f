"""Races on a clock that the tests play: noise, drift, hiccups, and many contestants."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from cufa.explorer.clock import Call, CudaClock, Reading
from cufa.explorer.race import Effort, Race, Time, duel, knock_out, order_of


class FakeClock:
    """A card whose calls answer with their name and milliseconds.

    Parameters
    ----------
    noise : float
        Relative standard deviation of a burst.
    drift : float
        By how much calls get slower in a second of the card's work, up to a half.
    hiccups : float
        Share of the bursts that take three times as long.
    """

    def __init__(self, noise: float = 0.0, drift: float = 0.0, hiccups: float = 0.0) -> None:
        self.noise, self.drift, self.hiccups = noise, drift, hiccups
        self.busy_s = 0.0
        self.bursts: list[tuple[str, int]] = []
        self.rests: list[int] = []
        self._random = random.Random(5)

    def burst(self, call: Call, calls: int) -> Reading:
        """Note who runs, and answer with a time like that of the call."""
        name, ms = call()
        ms *= 1 + min(0.5, self.drift * self.busy_s)
        ms *= max(0.5, self._random.gauss(1, self.noise))
        if self._random.random() < self.hiccups:
            ms *= 3
        self.busy_s += ms * calls / 1e3
        self.bursts.append((name, calls))
        return lambda: ms

    def rest(self) -> None:
        """Note how many bursts there have been."""
        self.rests.append(len(self.bursts))

    def count(self, name: str) -> int:
        """Return the bursts of a contestant."""
        return sum(each == name for each, _ in self.bursts)


def calls_of(times: dict[str, float]) -> dict[str, Callable[[], tuple[str, float]]]:
    def call_of(name: str) -> Callable[[], tuple[str, float]]:
        return lambda: (name, times[name])

    return {name: call_of(name) for name in times}


def run(times: dict[str, float], clock: FakeClock, effort: Effort | None = None) -> dict[str, Time]:
    race = Race(calls_of(times), clock)
    done: list[str] = []
    knock_out(race, lambda name, time: done.append(name), effort)
    assert sorted(done) == sorted(times)  # each once
    return race.times()


def winner_of(found: dict[str, Time]) -> str:
    return min(found, key=lambda name: found[name].ms)


FIELD = {f"v{i:02}": 1.0 + 0.013 * i * i / 10 + 0.02 * i for i in range(80)}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 12, 60])
def test_nobody_is_always_first(n: int) -> None:
    names = list(range(n))
    orders = [order_of(names, i) for i in range(2 * n)]
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)
    assert {order[-1] for order in orders} == set(names)


def test_places_change_within_few_rounds() -> None:
    places = [order_of(list(range(60)), i).index(30) for i in range(8)]
    assert len(set(places)) >= 6
    assert max(places) - min(places) > 30


def test_without_noise_times_are_exact() -> None:
    found = run(FIELD, FakeClock())
    for name, ms in FIELD.items():
        assert found[name].ms == pytest.approx(ms)
    assert found["v00"].spread == 0


@pytest.mark.parametrize(
    "clock",
    [
        FakeClock(noise=0.01),
        FakeClock(drift=0.1),
        FakeClock(noise=0.01, drift=0.1),
        FakeClock(noise=0.003, hiccups=0.05),
    ],
    ids=["noise", "drift", "both", "hiccups"],
)
def test_winner_is_found(clock: FakeClock) -> None:
    found = run(FIELD, clock)
    assert FIELD[winner_of(found)] < 1.02
    assert found["v00"].ms == pytest.approx(min(time.ms for time in found.values()), rel=0.02)
    spread = found[winner_of(found)].spread
    assert spread is not None
    assert 0 <= spread < 0.2


def test_order_holds_in_spite_of_drift() -> None:
    times = {"a": 1.0, "b": 1.02, "c": 1.06, "d": 1.15, "e": 1.3, "f": 3.0}
    found = run(times, FakeClock(drift=0.4))
    assert sorted(found, key=lambda name: found[name].ms) == sorted(times)
    for name in times:
        assert found[name].ms / found["a"].ms == pytest.approx(times[name], rel=0.03)


def test_slow_ones_leave_early_and_leaders_stay() -> None:
    clock = FakeClock(noise=0.005)
    run({"a": 1.0, "b": 1.01, "near": 1.1, "slow": 1.4, "hopeless": 5.0}, clock)
    assert clock.count("hopeless") == 1
    assert 2 <= clock.count("slow") <= 4
    assert clock.count("near") < clock.count("a") == clock.count("b")
    assert clock.count("a") >= 1 + 3 + 3 + 16


def test_settles_when_the_spread_is_small() -> None:
    quiet, noisy = FakeClock(), FakeClock(noise=0.04)
    for clock in (quiet, noisy):
        run({"a": 1.0, "b": 1.05}, clock)
    assert quiet.count("b") == 1 + 3 + 3
    assert noisy.count("b") > quiet.count("b")


def test_bursts_are_long_enough_and_the_card_rests() -> None:
    clock = FakeClock()
    run({"short": 0.01, "long": 50.0, **{str(i): 0.012 for i in range(40)}}, clock)
    assert {calls for name, calls in clock.bursts if name == "long"} == {1}
    assert ("short", 200) in clock.bursts
    gaps = [b - a for a, b in zip([0, *clock.rests], clock.rests, strict=False)]
    assert max(gaps) <= 40


def test_time_is_limited() -> None:
    times = {f"v{i:03}": 20.0 * (1 + 0.001 * i) for i in range(120)}
    clock = FakeClock(noise=0.02)
    run(times, clock)
    assert clock.busy_s < 40


def test_a_single_contestant() -> None:
    found = run({"a": 2.0}, FakeClock(noise=0.001))
    assert found["a"].ms == pytest.approx(2, rel=0.01)
    assert run({}, FakeClock()) == {}


def test_what_is_known_when_it_is_interrupted() -> None:
    clock = FakeClock()
    calls: dict[str, Any] = calls_of({"a": 1.0, "b": 1.1, "c": 9.0})
    race = Race(calls, clock)
    assert race.times() == {}

    def stop() -> Any:
        if len(clock.bursts) >= 11:
            raise KeyboardInterrupt
        return "a", 1.0

    calls["a"] = stop
    with pytest.raises(KeyboardInterrupt):
        knock_out(race, lambda name, time: None)
    found = race.times()
    assert {name: time.ms for name, time in found.items()} == pytest.approx(
        {"a": 1.0, "b": 1.1, "c": 9.0}
    )
    assert found["c"].spread is None


# duels


@pytest.mark.parametrize("clock", [FakeClock(noise=0.01), FakeClock(noise=0.01, drift=0.2)])
def test_duel(clock: FakeClock) -> None:
    calls = calls_of({"old": 1.05, "new": 1.0})
    found = duel(calls["old"], calls["new"], clock)
    assert found.ratio == pytest.approx(1.05, rel=0.01)
    assert found.first_ms > found.second_ms
    assert clock.count("old") == clock.count("new") > 30


def test_duel_is_decided_on_a_warm_card() -> None:
    clock = FakeClock()
    calls = calls_of({"old": 1.0})
    found = duel(calls["old"], lambda: ("new", 0.9 if clock.busy_s < 0.4 else 1.1), clock)
    assert found.ratio == pytest.approx(1 / 1.1)


@pytest.mark.gpu
@pytest.mark.parametrize("every_call", [False, True])
def test_cuda_clock(cupy: Any, every_call: bool) -> None:
    clock = CudaClock(rest_s=0, flush_bytes=1 << 20, every_call=every_call)
    data = cupy.zeros(1 << 24, cupy.float32)

    def call() -> None:
        data.fill(1)

    call()
    assert 0 < clock.burst(call, 3)() < 1000
    clock.rest()
