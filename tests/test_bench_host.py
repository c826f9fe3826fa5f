"""bench.py host: contestants take turns by batches that are made each time, and lengths are new."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

pytest.importorskip("cupy")

from benchmarks import host, host_clock, host_decode
from benchmarks.calls import Chosen
from benchmarks.cells import Cell
from benchmarks.host import BATCHES, CALLS, FreshLengths
from benchmarks.host_clock import WARM, medians

from cufa import device

CASES = [
    *("same", "new_lengths", "growing_cache", "copied", "out", "fp8", "from_16_bits"),
    *("decode", "decode_new_lengths", "decode_paged", "append"),
]


class Tensor(np.ndarray):
    """Stands for a tensor."""

    def copy_(self, other: Any) -> None:
        """Stand for the method."""
        assert self.shape == other.shape


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Play the clock; what is returned lets it go on, in nanoseconds."""
    now = 0

    def pass_(ns: int) -> None:
        nonlocal now
        now += ns

    monkeypatch.setattr(host_clock, "perf_counter_ns", lambda: now)
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
    found = medians(batch, BATCHES, lambda: waits.append(len(order)))
    assert found == {"cufa": 9.0, "floor": 7.0}
    assert gc.isenabled()
    assert order.count("batch") == WARM + BATCHES
    assert order.count("cufa") == order.count("floor") == (WARM + BATCHES) * CALLS
    firsts = [after for before, after in itertools.pairwise(order) if before == "batch"]
    assert firsts.count("cufa") == firsts.count("floor")
    assert len(waits) == 4 * (WARM + BATCHES)


def test_a_choice_is_made_once_for_a_batch_and_is_not_timed(clock: Callable[[int], None]) -> None:
    chosen: list[int] = []

    @contextlib.contextmanager
    def choice() -> Iterator[None]:
        clock(10**6)
        chosen.append(0)
        yield
        clock(10**6)

    def call() -> None:
        chosen[-1] += 1
        clock(5000)

    def batch() -> dict[str, list[Any]]:
        return {"sdpa": [Chosen(choice, call) for _ in range(3)]}

    assert medians(batch, 2, lambda: None) == {"sdpa": 5.0}
    assert chosen == [3] * (WARM + 2)
    Chosen(choice, call)()
    assert chosen[-1] == 1


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Play PyTorch; what is returned holds its function and the context of a backend."""
    attention, functional = MagicMock(), MagicMock()
    for name in ("torch", "torch.nn"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setitem(sys.modules, "torch.nn.attention", attention)
    monkeypatch.setitem(sys.modules, "torch.nn.functional", functional)
    for module in (host, host_decode):
        monkeypatch.setattr(module, "cupy", MagicMock())
        monkeypatch.setattr(module, "to_torch", lambda x: x.view(Tensor))
        monkeypatch.setattr(
            module,
            "Operands",
            lambda cell, rng: SimpleNamespace(
                **{x: np.zeros(getattr(cell, f"{x}_shape"), np.float16) for x in "qkv"}
            ),
        )
    host_decode.cupy.asarray = lambda x: x
    monkeypatch.setattr(host.devices, "current", lambda: device.named("h200"))
    monkeypatch.setattr(host, "quantized", lambda operands: (operands.q, operands.k, operands.v))
    monkeypatch.setattr(host_decode, "cufa", cufa := MagicMock())
    return SimpleNamespace(
        cufa=cufa,
        sdpa=functional.scaled_dot_product_attention,
        chosen=attention.sdpa_kernel,
        flash=attention.SDPBackend.FLASH_ATTENTION,
    )


def test_every_case_has_sdpa_and_the_floor(played: Any) -> None:
    cases = host._Bench(None).cases()
    assert list(cases) == CASES
    for case, (cell, batch) in cases.items():
        calls = batch()
        assert set(calls) == {"cufa", "sdpa", "sdpa_default", "floor"}
        new = case in ("new_lengths", "growing_cache", "decode_new_lengths", "append")
        # A backend that prepares each length for itself would take minutes.
        assert {name: len(many) for name, many in calls.items()} == {
            **dict.fromkeys(calls, CALLS),
            "sdpa_default": 1 if new else CALLS,
        }
        shapes = set()
        for call in calls["sdpa"]:
            played.sdpa.reset_mock()
            played.chosen.reset_mock()
            call()
            played.chosen.assert_called_once_with(played.flash)
            q, k, v = played.sdpa.call_args.args
            assert q.shape[3] == k.shape[3] == v.shape[3] == cell.d
            shapes.add((q.shape[2], k.shape[2]))
        assert len(shapes) == (CALLS if new else 1)


def test_lengths_are_never_seen_again() -> None:
    lengths = FreshLengths(40)
    drawn = [pair for _ in range(10) for pair in lengths.draw(50)]
    assert len(set(drawn)) == 500
    assert {n for pair in drawn for n in pair} <= set(range(1, 41))
    assert FreshLengths(40).draw(50) == drawn[:50]


@pytest.mark.gpu
def test_every_case_has_its_figures(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "BATCHES", 2)
    rows = list(host.rows(None))
    assert [row["case"] for row in rows] == CASES
    for row in rows:
        assert {name: row[name] for name in Cell._fields}
        assert row["cufa"] > row["peers"]["floor"] > 0
