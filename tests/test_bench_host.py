"""bench.py host: contestants take turns by batches that are made anew, and lengths are new."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cupy")

from benchmarks import host
from benchmarks.cells import Cell
from benchmarks.host import BATCHES, CALLS, WARM, FreshLengths, medians


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Play the clock; what is returned lets it go on, in nanoseconds."""
    now = 0

    def pass_(ns: int) -> None:
        nonlocal now
        now += ns

    monkeypatch.setattr(host, "perf_counter_ns", lambda: now)
    return pass_


def test_medians_of_calls_that_take_turns(clock: Callable[[int], None]) -> None:
    order: list[str] = []

    def batch() -> dict[str, list[Any]]:
        """Make every fifth call of a batch slow, and the first batches slower still."""
        clock(10**9)  # what making takes is not counted
        order.append("batch")
        late = 10**6 if order.count("batch") <= WARM else 0

        def call(name: str, ns: int) -> None:
            assert not gc.isenabled()
            order.append(name)
            clock(ns + late)

        return {
            name: [
                lambda n=n, name=name, ns=ns: call(name, 50 * ns if n % 5 == 0 else ns)
                for n in range(CALLS)
            ]
            for name, ns in (("cufa", 9000), ("floor", 7000))
        }

    waits: list[int] = []
    found = medians(batch, lambda: waits.append(len(order)))
    assert found == {"cufa": 9.0, "floor": 7.0}
    assert gc.isenabled()
    assert order.count("batch") == WARM + BATCHES
    assert order.count("cufa") == order.count("floor") == (WARM + BATCHES) * CALLS
    firsts = [after for before, after in itertools.pairwise(order) if before == "batch"]
    assert firsts.count("cufa") == firsts.count("floor")
    assert len(waits) == 4 * (WARM + BATCHES)


def test_lengths_are_never_seen_again() -> None:
    lengths = FreshLengths(40)
    drawn = [pair for _ in range(10) for pair in lengths.draw(50)]
    assert len(set(drawn)) == 500
    assert {n for pair in drawn for n in pair} <= set(range(1, 41))
    assert FreshLengths(40).draw(50) == drawn[:50]


def test_there_are_enough_lengths() -> None:
    assert (WARM + BATCHES) * CALLS < host.LONGEST**2 / 4


@pytest.mark.gpu
def test_every_case_has_its_figures(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "BATCHES", 2)
    rows = list(host.rows(None))
    cases = ["same", "new_lengths", "growing_cache", "copied", "out"]
    assert [row["case"] for row in rows] == cases
    for row in rows:
        assert {name: row[name] for name in Cell._fields}
        assert row["cufa"] > row["peers"]["floor"] > 0
