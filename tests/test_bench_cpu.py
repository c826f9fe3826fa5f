"""bench.py cpu: rows, the page, and a process with one thread."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import bench
import numpy as np
import pytest
from benchmarks import cpu, results
from benchmarks.report import markdown


def test_cells() -> None:
    found = [cell for pair in cpu.cells() for cell in pair]
    assert len(set(found)) == 6
    assert {cell.dtype for cell in found} == {"float32"}
    assert [cell.causal for cell in found] == [False, True] * 3


@pytest.mark.parametrize("has_torch", [False, True])
def test_a_run(
    has_torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A small shape gives the file, and its page."""
    monkeypatch.setattr(cpu, "SHAPES", ((1, 2, 70, 16),))
    monkeypatch.setattr(cpu, "take_one_thread", lambda: None)
    if has_torch:
        pytest.importorskip("torch")
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "cpu.json"
    assert bench.main(["cpu", "--rounds", "2", "--out", str(path)]) == 0
    assert ("torch is not here" in capsys.readouterr().out) != has_torch
    result = results.read(path)
    assert result["device"]
    assert result["versions"]["numpy"] == np.__version__
    full, causal = result["rows"]
    peers = {"numpy", "torch"} if has_torch else {"numpy"}
    assert full["peers"].keys() == peers
    assert causal["peers"].keys() == peers | {"cufa_full"}
    assert causal["peers"]["cufa_full"] == full["cufa"]
    for row in (full, causal):
        assert row["peers_maxerr"].keys() == peers
        assert max(row["cufa_maxerr"], *row["peers_maxerr"].values()) < 1e-5
    page = markdown(result, "cpu.json", "cpu.png")
    assert f"# NumPy arrays, one thread, on {result['device']}" in page
    assert "cufa_full/cufa" in page
    assert "driver" not in page


def test_rounds_take_turns() -> None:
    told: list[str] = []
    calls = {name: lambda name=name: told.append(name) for name in "abc"}
    assert cpu.medians(calls, 4).keys() == set("abc")
    turns = [tuple(told[i : i + 3]) for i in range(0, 12, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) == 4


def test_a_process_is_started_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is one."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, environment: started.append(environment))
    for name in cpu.ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    cpu.take_one_thread()
    assert len(started) == 1
    assert started[0].items() >= cpu.ONE_THREAD.items()
    for name, number in cpu.ONE_THREAD.items():
        monkeypatch.setenv(name, number)
    cpu.take_one_thread()
    assert len(started) == 1


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    rows = [
        {**cell.row(), "unit": "us", "cufa": 2.0, "peers": {"numpy": 3.0}}
        for pair in cpu.cells()
        for cell in pair
    ]
    plots.draw({"bench": "cpu", "device": "a processor", "rows": rows}, tmp_path / "cpu.png")
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")
