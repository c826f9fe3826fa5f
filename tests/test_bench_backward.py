"""bench.py backward: cases, errors, rows and pages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from benchmarks import gradient_errors, results
from benchmarks.backward_cases import FAMILIES, Case, cases
from benchmarks.cells import VARLEN_LENGTHS, Cell
from benchmarks.model_shapes import SHAPES
from benchmarks.race import Budget
from test_bench_tables import page_of

import cufa
from cufa.device import named
from cufa.explorer.clock import Call, Reading

H200 = named("h200")


def test_cases() -> None:
    found = cases(FAMILIES)
    rows = [{**case.row(), **case.cell.row()} for case in found]
    assert len({results._identity(row) for row in rows}) == len(found)
    sizes = Counter(case.feature for case in found)
    assert sizes == {
        **{"table": 36, "deterministic": 36, "gqa": 6, "models": 10},
        **{"window": 2, "varlen": 2, "fp32": 8},
    }
    shapes = {(shape.model, shape.cell) for shape in SHAPES}
    assert all((case.model, case.cell) in shapes for case in found if case.model)
    assert sum(VARLEN_LENGTHS) == 16384
    some = cases(["table", "fp32"], [64, 96])
    assert [case.cell.d for case in some] == [64] * (12 + 4)


def test_operations() -> None:
    """Five products, of the pairs that are seen."""
    full = Cell("bfloat16", 2, 4, 2, 100, 100, 64, 64, False)
    causal = full._replace(causal=True)
    assert Case("table", full).flops == 10 * 2 * 4 * 100 * 100 * 64
    assert Case("table", causal).flops == Case("table", full).flops / 2
    assert Case("models", full, model="a").flops == 1.4 * Case("table", full).flops
    pairs = sum(min(i + 1, 30) for i in range(100))
    assert Case("window", causal, window=30).flops == 10 * 2 * 4 * pairs * 64
    one = causal._replace(b=1)
    assert Case("varlen", one, lengths=(70, 30)).flops == 5 * 4 * (4900 + 900) * 64


def _data(case: Case) -> Any:
    rng, c = np.random.default_rng(3), case.cell
    shapes = c.q_shape, c.k_shape, c.v_shape, (c.b, c.hq, c.sq, c.dv)
    q, k, v, dout = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return SimpleNamespace(case=case, cell=c, q=q, k=k, v=v, dout=dout)


def _found(data: Any) -> tuple[Any, ...]:
    options = data.case.options
    out, lse = cufa.attention(data.q, data.k, data.v, return_lse=True, **options)
    return cufa.attention_backward(data.dout, data.q, data.k, data.v, out, lse, **options)


CELL = Cell("float32", 2, 4, 2, 50, 50, 16, 24, True)


@pytest.mark.parametrize(
    "case",
    [
        Case("table", CELL._replace(causal=False)),
        Case("table", CELL),
        Case("window", CELL, window=7),
    ],
    ids=str,
)
def test_errors_against_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_errors, "CHUNK_ROWS", 16)
    data = _data(case)
    right = _found(data)
    results = {"right": right, "nan": tuple(x * np.float32("nan") for x in right)}
    for i in range(3):
        wrong = [x.copy() for x in right]
        wrong[i][-1, -1] += np.abs(wrong[i]).max()
        results[f"wrong {i}"] = tuple(wrong)
    errors = gradient_errors.max_errors(np, data, results)
    assert errors.pop("right") < 1e-5
    assert np.isnan(errors.pop("nan"))
    assert all(error > 0.9 for error in errors.values())


def test_errors_of_the_first_sequence() -> None:
    case = Case("varlen", CELL._replace(b=1, dv=16), lengths=(20, 30))
    data = _data(case)
    part = slice(0, 20)
    names = ("q", "k", "v", "dout")
    first = SimpleNamespace(case=case, **{n: getattr(data, n)[:, :, part] for n in names})
    found = [np.zeros_like(getattr(data, name)) for name in ("q", "k", "v")]
    for whole, its in zip(found, _found(first), strict=True):
        whole[:, :, part] = its
    assert gradient_errors.max_errors(np, data, {"cufa": tuple(found)})["cufa"] < 1e-5


class PlayedClock:
    """A clock that reads what a call returns."""

    def burst(self, call: Call, calls: int) -> Reading:
        """Return a reading of a call."""
        found = call()
        return lambda: found

    def rest(self) -> None:
        """Rest not."""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return rows of cells in which cufa takes 1 ms and cudnn 2; in windows it cannot."""
    pytest.importorskip("cupy")
    from benchmarks import backward, contestants

    def maker(ms: float) -> Any:
        def make(data: Any) -> Call:
            if ms > 1 and data.case.window:
                raise ValueError("no windows")
            return lambda: ms

        return make

    monkeypatch.setattr(backward, "cupy", MagicMock())
    monkeypatch.setattr(contestants, "cupy", MagicMock())
    monkeypatch.setattr(contestants, "free_memory", lambda: None)
    monkeypatch.setattr(contestants, "to_cupy", lambda result: result)
    monkeypatch.setattr(backward, "Data", lambda case, rng: _data(case))
    monkeypatch.setattr(backward, "cufa_gradients", maker(1.0))
    monkeypatch.setattr(backward, "PEERS", {"cudnn": maker(2.0)})
    monkeypatch.setattr(backward, "max_errors", lambda xp, data, found: dict.fromkeys(found, 1e-3))
    monkeypatch.setattr(backward.devices, "current", lambda: H200)
    monkeypatch.setattr(backward.graphs, "one_stream", MagicMock())
    monkeypatch.setattr(backward.graphs, "capture", lambda call, calls: lambda: call() * calls)
    some = [
        Case("table", CELL),
        Case("deterministic", CELL, deterministic=True),
        Case("models", CELL, model="small"),
        Case("window", CELL, window=7),
        Case("varlen", CELL._replace(b=1), lengths=(20, 30)),
    ]
    field = backward.Gradients(["cudnn"])
    found = list(backward.rows(field, some, PlayedClock(), Budget(rounds=2), seed=1))
    assert field.failed == 0
    return found


def test_rows(rows: list[dict[str, Any]]) -> None:
    table, deterministic, model, window, varlen = rows
    assert table["cufa"] == pytest.approx(2 * table["peers"]["cudnn"], rel=1e-3)
    assert table["cufa"] == pytest.approx(Case("table", CELL).flops / 1e9, rel=1e-3)
    assert (table["kernel"], table["unit"], table["feature"]) == ("bwd_fp32", "TFLOP/s", "table")
    assert table["replayed"] == ["cufa", "cudnn"]
    assert not table["deterministic"]
    assert deterministic["deterministic"]
    assert model["model"] == "small"
    assert (window["peers"], window["gaps"]) == ({}, {"cudnn": "no windows"})
    assert varlen["feature"] == "varlen"


def test_page(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    text = page_of(tmp_path, "backward", rows)
    assert text.startswith("# Gradients on NVIDIA H200\n")
    assert "| table | best peer | 1 | 2.000 | 2.000 | D 16/24, causal, S 50 |" in text
    assert "| models | small | float32 |" in text
    assert "| cudnn | 1 | no windows |" in text


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FAMILIES)
def test_contestants_compute_the_same(cupy: Any, feature: str) -> None:
    """All that are here run a small case, in graphs, and are right."""
    from benchmarks import backward

    from cufa.explorer.clock import CudaClock

    case = cases([feature])[-1]
    cell = case.cell._replace(b=1 if case.lengths else 2, sq=400, sk=400)
    small = case._replace(cell=cell, lengths=(300, 100) if case.lengths else ())
    field = backward.Gradients(backward.PEERS)
    (row,) = backward.rows(field, [small], CudaClock(rest_s=0), Budget(rounds=2), seed=1)
    assert row["replayed"] == ["cufa", *row["peers"]]
    assert max(row["cufa_maxerr"], *row["peers_maxerr"].values(), 0) < 0.02
