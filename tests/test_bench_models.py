"""bench.py models: shapes, sets of operands, rows and pages, with a played GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from benchmarks import options, summary
from benchmarks.cells import Cell
from benchmarks.model_shapes import SHAPES, Shape, kind_of
from benchmarks.race import Budget, CaptureError
from test_bench_tables import PlayedClock, page_of

from cufa.explorer.clock import Call
from cufa.specs.variant import Variant

VARIANT = Variant("fa3_wgmma", "bfloat16", 128, 128, 128, 128, 2, 12, 1)
L2_BYTES = 50 << 20
PROMPT = Shape("llama3-8b", Cell("bfloat16", 1, 32, 8, 1024, 1024, 128, 128, True))
CHUNK = Shape("chunk", Cell("bfloat16", 1, 32, 8, 512, 8704, 128, 128, True))


# shapes


def test_shapes() -> None:
    assert len(SHAPES) == len(set(SHAPES)) > 80
    assert {PROMPT, CHUNK} <= set(SHAPES)
    for model, cell in SHAPES:
        assert cell.dtype == "bfloat16"
        assert cell.problem.group * cell.hk == cell.hq
        assert not cell.causal or cell.sk >= cell.sq, model
    assert {kind_of(cell.row()) for _, cell in SHAPES} == {"prompt", "cache", "full", "cross"}


def test_a_cache_is_not_in_l2() -> None:
    pytest.importorskip("cupy")
    from benchmarks.models import sets_of

    assert sets_of(PROMPT.cell, L2_BYTES) == 1
    for _, cell in SHAPES:
        cache_bytes = cell.b * cell.hk * cell.sk * (cell.d + cell.dv) * 2
        count = sets_of(cell, L2_BYTES)
        if kind_of(cell.row()) == "cache":
            # The bytes that are read between two uses of a set.
            assert (count - 1) * cache_bytes >= 32 * L2_BYTES > (count - 2) * cache_bytes
        else:
            assert count == 1


# rows and pages


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Return what runs the benchmark: in a graph cufa takes 20 us, fa2 80, and cudnn 30.

    A cuDNN call on the host takes 40 us, others 10; cudnn cannot run a chunk.
    """
    pytest.importorskip("cupy")
    from benchmarks import contestants, host_clock, models

    now, inside = 0, False
    ms = {"cufa": 0.02, "batch_invariant": 0.025, "cudnn": 0.03, "fa2": 0.08}
    seen: list[int] = []

    def call(name: str) -> float:
        nonlocal now
        now += 40_000 if name == "cudnn" else 10_000
        return ms[name] if inside else 0.1

    def capture(call: Call, calls: int) -> Call:
        nonlocal inside
        inside = True
        try:
            found = call()
        finally:
            inside = False
        if found == ms["fa2"]:
            raise CaptureError("it allocates")
        return lambda: found * calls

    def ready(*sets: Cell) -> Any:
        seen.append(len(sets))
        names = [each for each in ms if each != "cudnn" or sets[0] != CHUNK.cell]
        gaps = {} if "cudnn" in names else {"cudnn": "not this one"}
        calls: dict[str, Any] = {name: lambda name=name: call(name) for name in names}
        return contestants.Ready(sets[0], VARIANT, calls, dict.fromkeys(names, 1e-3), gaps)

    monkeypatch.setattr(models, "cupy", MagicMock())
    monkeypatch.setattr(models.devices, "current", lambda: SimpleNamespace(l2_bytes=L2_BYTES))
    monkeypatch.setattr(models, "Operands", lambda cell, rng: cell)
    monkeypatch.setattr(models.graphs, "capture", capture)
    monkeypatch.setattr(contestants, "free_memory", lambda: None)
    monkeypatch.setattr(host_clock, "cupy", MagicMock())
    monkeypatch.setattr(host_clock, "perf_counter_ns", lambda: now)

    def rows(*shapes: Shape) -> list[dict[str, Any]]:
        field: Any = SimpleNamespace(ready=ready)
        found = list(models.rows(field, shapes, PlayedClock(), Budget(rounds=2), seed=1))
        assert seen == [49 if shape == CHUNK else 1 for shape in shapes]
        return found

    return rows


def test_rows(rows_of: Callable[..., list[dict[str, Any]]]) -> None:
    prompt, chunk = rows_of(PROMPT, CHUNK)
    assert {name: prompt[name] for name in Cell._fields} == PROMPT.cell.row()
    assert (prompt["model"], prompt["unit"], prompt["kernel"]) == ("llama3-8b", "us", "fa3_wgmma")
    # Calls that no graph takes are timed by events.
    assert (prompt["cufa"], prompt["peers"]) == (20.0, {"cudnn": 30.0, "fa2": 100.0})
    assert prompt["replayed"] == ["cufa", "cudnn"]
    assert prompt["cufa_host_us"] == 10.0
    assert prompt["peers_host_us"] == {"cudnn": 40.0, "fa2": 10.0}
    assert prompt["batch_invariant"] == 25.0
    assert not {"gaps", "sets"} & set(prompt)
    assert (chunk["model"], set(chunk["peers"])) == ("chunk", {"fa2"})
    assert (chunk["gaps"], chunk["sets"]) == ({"cudnn": "not this one"}, 49)


def test_page(rows_of: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    text = page_of(tmp_path, "models", rows_of(PROMPT, CHUNK))
    assert text.startswith("# Shapes of real models on NVIDIA H200\n")
    assert "| all | cudnn | 1 | 1.500 | 1.500 | llama3-8b: D 128, causal, S 1024 |" in text
    assert "| all | best peer | 2 | 2.739 | 1.500 |" in text
    assert "| cache | best peer | 1 | 5.000 | 5.000 | chunk: D 128, causal, S 512x8704 |" in text
    assert "| 30.0 | 100.0 | 30.0 | 1.50 | 5.00 | 1.50 | graph; fa2: events |" in text
    assert "| chunk | bfloat16 | 128 | causal | 512x8704 | 1 | 32/8 | 10.0 |  | 10.0 |" in text
    assert "| cudnn | 1 | not this one |" in text
    assert "takes 1.250 times as long in geometric mean, at most 1.25." in text
    assert "| 1.00e-03 |" in text


def test_the_best_peer_by_speed() -> None:
    row = {"unit": "TFLOP/s", "cufa": 3.0, "peers": {"a": 1.0, "b": 2.0}}
    best, none = summary.with_best([row, {**row, "peers": {}}], "best")
    assert best["peers"]["best"] == 2.0
    assert none["peers"] == {}


# on a GPU


@pytest.mark.gpu
def test_peers_compute_the_same(cupy: Any) -> None:
    """Aligned at its end, too, where queries are fewer than keys."""
    pytest.importorskip("torch")
    from benchmarks import models

    from cufa.explorer.clock import CudaClock

    few = [shape for shape in SHAPES if max(shape.cell.sq, shape.cell.sk) <= 512]
    chunk = CHUNK._replace(cell=CHUNK.cell._replace(sq=100, sk=700))
    field = models.Models(None, options.MODEL_PEERS)
    clock = CudaClock(rest_s=0)
    rows = list(models.rows(field, [*few[:3], chunk], clock, Budget(rounds=2), seed=1))
    assert len(rows) == 4
    for row in rows:
        assert {"cufa", "fa2"} <= set(row["replayed"])
        for error in (row["cufa_maxerr"], *row["peers_maxerr"].values()):
            assert error < 0.03
        assert row["cufa_host_us"] > 1
        assert 0.5 < row["cufa"] < 500
        assert 0.5 < row["batch_invariant"] < 500
