"""Races of the benchmarks on a clock that the tests play: budgets, medians and replays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from benchmarks.race import Budget, CaptureError, Race, medians
from test_explorer_race import FakeClock, calls_of

from cufa.explorer.clock import Call


def rounds_of(clock: FakeClock) -> list[list[str]]:
    """Return who ran between two rests."""
    names = [name for name, _ in clock.bursts]
    return [names[a:b] for a, b in zip([0, *clock.rests], clock.rests, strict=False)]


def test_medians_of_contestants_that_take_turns() -> None:
    clock = FakeClock()
    found = medians(calls_of({"a": 1.0, "b": 2.0, "c": 8.0}), clock, Budget(rounds=6, burst_ms=4))
    assert found == {"a": 1.0, "b": 2.0, "c": 8.0}
    estimates, *rounds = rounds_of(clock)
    assert estimates == ["a", "b", "c"]
    assert len(rounds) == 6
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert {names[0] for names in rounds} == {"a", "b", "c"}
    assert {names[-1] for names in rounds} == {"a", "b", "c"}
    assert [calls for name, calls in clock.bursts if name == "a"] == [1] + [4] * 6
    assert [calls for name, calls in clock.bursts if name == "c"] == [1] * 7


def test_slow_contestants_are_sampled_less() -> None:
    clock = FakeClock()
    budget = Budget(rounds=10, burst_ms=6.0, contestant_ms=400.0, long_ms=1000.0)
    times = {"fast": 1.0, "slow": 100.0, "slower": 900.0, "long": 2000.0}
    assert medians(calls_of(times), clock, budget) == times
    counts = {name: clock.count(name) for name in times}
    assert counts == {"fast": 11, "slow": 1 + 4, "slower": 1 + 3, "long": 1}
    places = [i for i, (name, _) in enumerate(clock.bursts) if name == "slow"][1:]
    between = [sum(n == "fast" for n, _ in clock.bursts[a:b]) for a, b in pairwise(places)]
    assert min(between) >= 1  # spread over the rounds


def test_it_is_the_median() -> None:
    times = iter([5.0, 1.0, 9.0, 2.0])
    assert medians({"a": lambda: ("a", next(times))}, FakeClock(), Budget(rounds=3)) == {"a": 2.0}


# replays


def test_replays_of_what_can_be_captured() -> None:
    times = {"a": 1.0, "b": 2.0, "none": 3.0, "empty": 4.0, "host": 5.0}  # "host": it is slow
    of_calls = {"empty": 0.001, "host": 0.04}
    calls: dict[str, Any] = calls_of(times)

    def capture(call: Call, n: int) -> Call:
        name, ms = call()
        if name == "none":
            raise CaptureError("it waits for the host")
        return lambda: (f"graph of {name}", of_calls.get(name, 0.9) * ms * n)

    clock = FakeClock()
    race = Race(calls, clock)
    assert race.replay(capture) == {
        "none": "it waits for the host",
        "empty": "nothing was captured",
    }
    for _ in range(5):
        race.round()
    assert {name: race.median(name) for name in times} == pytest.approx(
        {"a": 0.9, "b": 1.8, "none": 3.0, "empty": 4.0, "host": 0.2}
    )
    assert clock.count("graph of a") == 1 + 5
    assert {n for name, n in clock.bursts if name.startswith("graph")} == {1}
    assert race.busy_ms == pytest.approx(5 * (4 * 0.9 + 2 * 1.8 + 3.0 + 4.0 + 0.2))


def test_a_first_call_that_sets_something_up_is_not_taken_for_a_long_one() -> None:
    times = iter([500.0])
    calls: dict[str, Any] = {"a": lambda: ("a", next(times, 1.0))}
    race = Race(calls, FakeClock())
    assert not race.replay(lambda call, n: lambda: ("graph of a", call()[1] * n))
    assert race.first_ms == {"a": 1.0}
    race.round()
    assert race.median("a") == 1.0
