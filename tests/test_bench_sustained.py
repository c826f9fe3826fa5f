"""The benchmark of speed held for seconds, with a played GPU and a played nvidia-smi."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from benchmarks import results
from benchmarks.monitor import Card, Monitor, command, medians, parse
from benchmarks.report import write_report
from test_bench import HEAD

from cufa.variant import Variant


def test_lines_of_nvidia_smi() -> None:
    assert parse("1980, 652.07\r\n") == (1980.0, 652.07)
    assert parse("1980, [N/A]") == (1980.0, None)
    assert parse("[Not Supported], 71.2") == (None, 71.2)
    assert parse("No devices were found") == parse("") == (None, None)


def test_medians_of_an_interval() -> None:
    readings = [
        (0.0, Card(2000.0, 100.0)),
        (1.0, Card(1500.0, 600.0)),
        (2.0, Card(1400.0, None)),
        (3.0, Card(1600.0, 690.06)),
        (4.0, Card(345.0, 80.0)),
    ]
    assert medians(readings, 0.5, 3.5) == (1500.0, 645.0)
    assert medians(readings, 2.0, 2.0) == (1400.0, None)
    assert medians(readings, 5.0, 6.0) == (None, None)


def test_the_command_asks_one_card() -> None:
    words = command("0000:1B:00.0")
    assert words[0] == "nvidia-smi"
    assert words[-2:] == ["-i", "0000:1B:00.0"]


def _wait_for(monitor: Monitor, began: float) -> Card:
    """Return the medians since then, once both are there."""
    while time.perf_counter() < began + 20:
        found = monitor.medians(began, time.perf_counter())
        if None not in found:
            return found
        time.sleep(0.01)
    raise AssertionError(monitor.complaint)


def test_monitor_reads_lines_as_they_are_written() -> None:
    # No flush: what is behind a pipe would wait for a full buffer.
    code = "import time\nwhile True: print('1755, 699.5'); time.sleep(0.01)"
    began = time.perf_counter()
    with Monitor([sys.executable, "-c", code]) as monitor:
        assert _wait_for(monitor, began) == (1755.0, 699.5)
        assert monitor._running is not None
        process, reader = monitor._running
        assert process.poll() is None
    assert process.returncode is not None
    assert not reader.is_alive()


def test_monitor_says_why_nothing_is_known() -> None:
    with Monitor(["no-such-nvidia-smi"]) as missing:
        assert missing.medians(0.0, time.perf_counter()) == (None, None)
    assert missing.complaint == "no-such-nvidia-smi does not start: No such file or directory"
    with Monitor([sys.executable, "-c", "print('1980, [N/A]')"]) as unknown:
        assert unknown._running is not None
        unknown._running[0].wait(timeout=20)
        unknown._running[1].join(timeout=20)
        assert unknown.medians(0.0, time.perf_counter()) == (1980.0, None)
    assert unknown.complaint.endswith("says '1980, [N/A]'")


def test_the_queue_is_never_empty_nor_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from benchmarks import sustained

    queued: list[int] = []  # calls before each event that nobody has waited for
    depths = []
    calls = itertools.count()

    class Event:
        def record(self) -> None:
            self.calls = next(calls)
            queued.append(self.calls)

        def synchronize(self) -> None:
            depths.append(len(queued))
            while queued and queued[0] <= self.calls:
                queued.pop(0)

    cuda = SimpleNamespace(
        Event=Event,
        Device=MagicMock(),
        get_elapsed_time=lambda start, stop: 3.0 * (stop.calls - start.calls - 1),
    )
    ticks = itertools.count()
    monkeypatch.setattr(sustained, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(sustained, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    ran = []
    ms = sustained.held_ms(lambda: ran.append(next(calls)), 50)
    assert len(ran) == 49 * sustained.BATCH
    assert set(depths[:-1]) == {sustained.AHEAD + 1}
    assert not queued
    # The time from the first event to the last, in which events have no part.
    assert ms == pytest.approx(3.0 * (len(ran) + 48) / len(ran))


class PlayedMonitor:
    """A card whose clock is its contestant's, and whose power is not known."""

    complaint = "nvidia-smi says '[N/A]'"

    def __init__(self, words: list[str]) -> None:
        self.clock = 1700.0

    def __enter__(self) -> PlayedMonitor:
        """Begin."""
        return self

    def __exit__(self, *error: object) -> None:
        """End."""

    def medians(self, first: float, last: float) -> Card:
        """Return another clock each time."""
        assert first < last
        self.clock += 1
        return Card(self.clock, None)


def test_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    pytest.importorskip("matplotlib")
    from benchmarks import contestants, sustained
    from benchmarks.contestants import Ready

    order = []

    def held_ms(call: str, seconds: float) -> float:
        order.append((call, seconds))
        return {"ours": 4.0, "theirs": 5.0}[call]

    def ready(cell: Any) -> Any:
        variant = Variant(
            "fa3_wgmma",
            "bfloat16",
            cell.d,
            cell.d,
            128,
            64,
            2,
            12,
            1,
            score=("Causal",) * cell.causal,
        )
        calls: Any = {"cufa": "ours", "cudnn": "theirs"}
        return Ready(cell, variant, calls, {"cufa": 1e-3, "cudnn": 2e-3})

    pauses: list[float] = []
    field: Any = SimpleNamespace(ready=ready)
    monkeypatch.setattr(sustained, "cupy", MagicMock())
    monkeypatch.setattr(sustained, "Monitor", PlayedMonitor)
    monkeypatch.setattr(sustained, "Operands", lambda cell, rng: cell)
    monkeypatch.setattr(contestants, "free_memory", lambda: None)
    monkeypatch.setattr(sustained, "held_ms", held_ms)
    monkeypatch.setattr(sustained.time, "sleep", pauses.append)
    rows = list(sustained.rows(field, 4.0, 3.0, seed=1))
    assert [(row["d"], row["causal"], row["hq"]) for row in rows] == [
        (d, causal, 2048 // d) for d in (64, 128, 256) for causal in (False, True)
    ]
    assert {(row["b"], row["sq"], row["sk"]) for row in rows} == {(1, 16384, 16384)}
    # Nobody is always first; all run as long, after as long a pause.
    assert order[:4] == [(name, 4.0) for name in ("ours", "theirs", "theirs", "ours")]
    assert pauses == [3.0] * 12
    first, second = rows[:2]
    assert (first["cufa_clock_mhz"], first["peers_clock_mhz"]) == (1701.0, {"cudnn": 1702.0})
    assert (second["cufa_clock_mhz"], second["peers_clock_mhz"]) == (1704.0, {"cudnn": 1703.0})
    assert (first["cufa_power_w"], first["peers_power_w"]) == (None, {"cudnn": None})
    assert capsys.readouterr().err.count("no power of cudnn: nvidia-smi says '[N/A]'") == 6

    rows[0]["cufa_power_w"] = 655.5
    result = {"bench": "sustained", **HEAD, "rows": rows}
    path = tmp_path / "h200-sustained.json"
    results.write(path, result)
    page, plot = write_report(path)
    text = page.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert text.startswith("# Speed held for seconds on NVIDIA H200\n")
    assert "| bfloat16 | cudnn | 6 | 1.250 | 1.250 |" in text
    assert "| 16384 | 1 | 32 | 1701.0 | 1702.0 | 655.5 |  |" in text
    rows[1]["peers_power_w"] = {"cudnn": 0}
    with pytest.raises(ValueError, match=r"rows\[1\]\.peers_power_w\.cudnn"):
        results.validate(result)
