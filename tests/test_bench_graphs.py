"""Cells timed by graph replay: with a played GPU, and captures on a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from benchmarks import results
from benchmarks.cells import Cell, standard_cells
from benchmarks.race import Budget, CaptureError
from benchmarks.report import markdown
from test_bench import HEAD
from test_bench_tables import PlayedClock

from cufa.explorer.clock import Call, CudaClock
from cufa.specs.variant import Variant

VARIANT = Variant("fa2_mma", "bfloat16", 128, 128, 128, 64, 2, 4, 2)


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Return what runs the benchmark: cufa takes `ms`, and fa2, which no graph takes, twice that.

    In a graph cufa's calls take half as long.
    """
    pytest.importorskip("cupy")
    from benchmarks import contestants, prefill
    from benchmarks.contestants import Ready

    def capture(call: Call, calls: int) -> Call:
        ms = call()
        if ms > field.ms:
            raise CaptureError("it allocates")
        return lambda: ms / 2 * calls

    field = MagicMock()
    field.ready = lambda cell: Ready(
        cell,
        VARIANT,
        {"cufa": lambda: field.ms, "fa2": lambda: 2 * field.ms},
        {"cufa": 1e-3, "fa2": 1e-3},
    )
    monkeypatch.setattr(prefill, "cupy", MagicMock())
    monkeypatch.setattr(prefill, "Operands", lambda cell, rng, scores: cell)
    monkeypatch.setattr(contestants, "free_memory", lambda: None)
    monkeypatch.setattr(prefill.graphs, "capture", capture)

    def rows(timing: str, ms: float) -> list[dict[str, Any]]:
        field.ms = ms
        cells = standard_cells("bfloat16", (128,), (512,))
        how = 1, "normal", timing
        return list(prefill.rows(field, cells, PlayedClock(), Budget(rounds=2), *how))

    return rows


@pytest.mark.parametrize(
    ("timing", "ms", "replayed"),
    [
        ("auto", 0.1, True),
        ("auto", 0.3, False),
        ("graph", 0.3, True),
        ("events", 0.1, False),
    ],
)
def test_which_cells_are_replayed(
    timing: str,
    ms: float,
    replayed: bool,
    rows_of: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = rows_of(timing, ms)
    assert len(rows) == 2
    for row, cell in zip(rows, standard_cells("bfloat16", (128,), (512,)), strict=True):
        assert row["cufa"] == pytest.approx(cell.tflops(ms / 2 if replayed else ms), rel=1e-4)
        assert row["peers"]["fa2"] == pytest.approx(cell.tflops(2 * ms), rel=1e-4)
        assert row.get("replayed") == (["cufa"] if replayed else None)
    said = capsys.readouterr().err
    assert said.count("fa2 is timed by events: it allocates\n") == (2 if replayed else 0)


def test_pages_say_what_was_replayed(
    rows_of: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    short, long = rows_of("auto", 0.1)[:1], rows_of("auto", 0.3)[:1]
    all_of_it = {**short[0], "replayed": ["cufa", "fa2"]}
    result = {"bench": "prefill", **HEAD, "rows": [*short, *long, all_of_it]}
    results.write(tmp_path / "x.json", result)
    page = markdown(result, "x.json", "x.png")
    assert "| timed by |\n" in page
    assert "| graph; fa2: events |\n" in page
    assert "| events |\n" in page
    assert "| graph |\n" in page
    assert "timed by" not in markdown({**result, "rows": long}, "x.json", "x.png")
    short[0]["replayed"] = ["cudnn"]
    with pytest.raises(ValueError, match=r"rows\[0\]\.replayed names cudnn"):
        results.validate(result)


# on a GPU


@pytest.fixture
def operands(cupy: Any) -> Iterator[Any]:
    from benchmarks.inputs import Operands

    cell = Cell("bfloat16", 4, 16, 16, 1000, 1000, 128, 128, True)
    yield Operands(cell, cupy.random.default_rng(0))
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cufa", "cudnn", "fa2"])  # CuPy cannot capture cuBLAS
def test_a_replay_takes_what_the_calls_take(cupy: Any, operands: Any, name: str) -> None:
    from benchmarks.graphs import capture
    from benchmarks.peers import PEERS, cufa_call

    if name in ("cudnn", "fa2"):
        pytest.importorskip("torch")
    call = cufa_call(operands, None) if name == "cufa" else PEERS[name](operands)
    call()
    clock, calls = CudaClock(rest_s=0), 20
    replay = capture(call, calls)
    replay()
    by_events = min(clock.burst(call, calls)() for _ in range(5))
    by_replay = min(clock.burst(replay, 1)() for _ in range(5)) / calls
    # Host cost is in the first alone, a call's own work in both: bounds that tell 1 from 20.
    assert 0.2 * by_events < by_replay < 2 * by_events


@pytest.mark.gpu
def test_what_cannot_be_captured_can_still_be_called(cupy: Any) -> None:
    from benchmarks.graphs import capture

    data = cupy.ones(10)

    def call() -> Any:
        data.sum().item()  # waits for the GPU
        return data

    with pytest.raises(CaptureError):
        capture(call, 2)
    call()
    assert float((data + 1).sum()) == 20
