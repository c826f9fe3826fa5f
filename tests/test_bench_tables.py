"""The benchmarks' tables of contestants, grouped heads and head dims, with a played GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from benchmarks import plain, results
from benchmarks.cells import Cell
from benchmarks.race import Budget
from benchmarks.report import write_report
from test_bench import HEAD

import cufa
from cufa.explorer.clock import Call, Reading
from cufa.specs.variant import Variant

VARIANT = Variant("fa3_wgmma", "bfloat16", 128, 128, 192, 80, 2, 16, 1, ping_pong=True)


def _ready(cell: Cell, calls: dict[str, Any], variant: Variant = VARIANT) -> Any:
    from benchmarks.contestants import Ready

    return Ready(cell, variant, calls, dict.fromkeys(calls, 0.00123456))


def page_of(tmp_path: Path, bench_name: str, rows: list[dict[str, Any]]) -> str:
    """Return the page of rows, once its plot is drawn, too."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"h200-{bench_name}.json"
    results.write(path, {"bench": bench_name, **HEAD, "rows": rows})
    page, plot = write_report(path)
    assert plot.read_bytes().startswith(b"\x89PNG")
    return page.read_text()


# contestants


def test_plain_attention_of_grouped_heads() -> None:
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 6, 9, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, 9, 8)).astype(np.float32) for _ in "kv")
    out = plain.attention(np, q, k, v, causal=True, scale=8**-0.5)
    np.testing.assert_allclose(out, cufa.attention(q, k, v, causal=True), atol=1e-5)


class PlayedCupy:
    """CuPy as far as contestants need it, on NumPy."""

    cuda = MagicMock()

    def __getattr__(self, name: str) -> Any:
        """Return NumPy's."""
        return getattr(np, name)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Play the contestants, and return the makers of their calls by name."""
    pytest.importorskip("cupy")
    from benchmarks import contestants

    makers: dict[str, Any] = {}
    monkeypatch.setattr(contestants, "cupy", PlayedCupy())
    monkeypatch.setattr(contestants, "PEERS", makers)
    monkeypatch.setattr(contestants, "cufa_call", lambda operands, kernel: makers["cufa"](operands))
    monkeypatch.setattr(contestants, "to_cupy", lambda result: result)
    monkeypatch.setattr(contestants, "planned", lambda operands, kernel: VARIANT)
    return makers


def _raise(error: Exception) -> Callable[[Any], Any]:
    def make(operands: Any) -> Any:
        raise error

    return make


def test_contestants(played: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.contestants import Contestants

    cell = Cell("float32", 1, 2, 1, 5, 5, 8, 8, False)
    rng = np.random.default_rng(7)
    q = rng.standard_normal(cell.q_shape).astype(np.float32)
    k, v = (rng.standard_normal(cell.k_shape).astype(np.float32) for _ in "kv")
    operands: Any = SimpleNamespace(cell=cell, q=q, k=k, v=v)
    right = cufa.attention(q, k, v)
    played["cufa"] = lambda operands: lambda: right
    played["near"] = lambda operands: lambda: right + np.float32(0.25)
    played["nan"] = lambda operands: lambda: right * np.float32("nan")
    played["absent"] = _raise(ImportError("no absent"))
    played["unable"] = _raise(ValueError("not this one\nnor others"))
    field = Contestants(None, ["near", "nan", "absent", "unable"])
    assert field.ready(operands) is not None
    ready = field.ready(operands)
    assert ready is not None
    assert list(ready.calls) == list(ready.errors) == ["cufa", "near"]
    row = ready.row({"cufa": 123.4567, "near": 61.0})
    assert (row["cufa"], row["peers"], row["kernel"]) == (123.46, {"near": 61.0}, "fa3_wgmma")
    assert row["cufa_maxerr"] < 1e-5
    assert row["peers_maxerr"] == {"near": pytest.approx(0.25, abs=1e-4)}
    said = capsys.readouterr().err
    assert said.count("absent is not here: no absent") == 1
    assert said.count("unable cannot: not this one\n") == said.count("nan gives results") == 2
    assert field.failed == 0
    played["cufa"] = played["unable"]
    assert field.ready(operands) is None
    assert field.failed == 1


def test_calls_take_all_sets_in_turn(played: dict[str, Any]) -> None:
    from benchmarks.contestants import Contestants

    def maker(operands: Any) -> Any:
        def call() -> Any:
            seen.append(operands)
            return operands.q

        return call

    seen: list[Any] = []
    cell = Cell("float32", 1, 2, 2, 3, 5, 8, 8, False)
    rng = np.random.default_rng(7)

    def drawn(seq: int) -> Any:
        return rng.standard_normal((1, 2, seq, 8)).astype(np.float32)

    sets: list[Any] = [
        SimpleNamespace(cell=cell, q=drawn(3), k=drawn(5), v=drawn(5)) for _ in range(3)
    ]
    played["cufa"] = played["peer"] = maker
    ready = Contestants(None, ["peer"]).ready(*sets)
    assert ready is not None
    assert list(ready.calls) == ["cufa", "peer"]
    assert seen == [sets[0]] * 2  # whose result is judged
    for _ in range(3):
        ready.calls["peer"]()
    assert seen[2:] == [sets[1], sets[2], sets[0]]


# head dims


class PlayedClock:
    """A device whose calls take what they return, in milliseconds."""

    def __init__(self) -> None:
        self.bursts: list[Any] = []

    def burst(self, call: Call, calls: int) -> Reading:
        """Note who runs, and answer with the call's own time."""
        self.bursts.append(call)
        return lambda: float(call())

    def rest(self) -> None:
        """Pass."""


class PlayedHeadDims:
    """Contestants of which cufa pads 80 to 96 and cuDNN cannot run 256."""

    def ready(self, cell: Cell) -> Any:
        """Return calls that take a millisecond for each 100 of D and DV, and for cuDNN two."""
        ms = (cell.d + cell.dv) / 100
        calls = {"cufa": lambda: ms, "cudnn": lambda: 2 * ms}
        if cell.d == 256:
            del calls["cudnn"]
        padded = 96 if cell.d == 80 else cell.d
        variant = VARIANT._replace(head_dim=padded, head_dim_v=96 if cell.dv == 80 else cell.dv)
        return _ready(cell, calls, variant)


def test_head_dims_are_raced_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    pytest.importorskip("matplotlib")
    from benchmarks import headdims

    clock = PlayedClock()
    monkeypatch.setattr(headdims, "cupy", MagicMock())
    monkeypatch.setattr(headdims, "Operands", lambda cell, rng: cell)
    monkeypatch.setattr(headdims, "free_memory", lambda: None)
    field: Any = PlayedHeadDims()
    rows = list(headdims.rows(field, clock, Budget(rounds=3), seed=1))
    assert len(rows) == 16
    # A single call of each of 15, then the rounds of one mask, then those of the other.
    assert len(clock.bursts) == 2 * 4 * 15
    for first in range(0, 120, 15):
        assert len(set(clock.bursts[first : first + 15])) == 15
    # Every contestant of a mask has the same TFLOP/s, with the operations of its own head dims.
    full = 2.0 * 2 * 16 * 8192 * 8192 * 100 / 1e9
    for row in rows:
        expected = full / 2 if row["causal"] else full
        assert row["cufa"] == row["peers"]["cufa_d128"] == pytest.approx(expected, rel=1e-4)
        assert ("cudnn" in row["peers"]) == (row["d"] < 256)
        assert ("cufa_padded" in row["peers"]) == (row["d"] == 80)
    page = page_of(tmp_path, "headdims", rows)
    assert page.startswith("# Head dims on NVIDIA H200\n")
    assert "How many times the TFLOP/s of each peer cufa has:" in page
    assert "| bfloat16 | cudnn | 14 | 2.000 | 2.000 |" in page
    assert "| bfloat16 | 192/128 | causal | 8192 | 2 | 16 | fa3_wgmma |" in page
    assert "| bfloat16 | 192/128 | causal | 8192 | 2 | 16 | 1.23e-03 | 1.23e-03 |\n" in page


# pages
