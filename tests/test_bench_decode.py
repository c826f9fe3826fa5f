"""bench.py decode: cells, rows and pages, with a played GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from benchmarks.cells import Cell
from benchmarks.race import Budget
from test_bench_tables import PlayedClock, page_of

import cufa
from cufa.explorer.clock import Call
from cufa.specs.variant import Variant

VARIANT = Variant("decode", "bfloat16", 128, 128, 16, 16, 2, 8, 1, kv="Contiguous")
ONE = Cell("bfloat16", 1, 32, 8, 1, 8192, 128, 128, False)
FOUR = Cell("bfloat16", 16, 32, 8, 4, 8192, 128, 128, True)


def test_cells() -> None:
    pytest.importorskip("cupy")
    from benchmarks.decode import cells

    found = cells()
    assert len(found) == len(set(found)) == 20
    assert {ONE, FOUR} <= set(found)
    # All queries but the last of a sequence do not see its last key.
    assert all(cell.causal == (cell.sq > 1) for cell in found)


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Return what runs the benchmark: cufa takes 10 us, 11 with pages, and fa2 25.

    fa2 takes no causal cell, and no graph; there are no pages of 256 in a causal one. An older
    package takes twice as long, if there is one.
    """
    pytest.importorskip("cupy")
    from benchmarks import contestants, decode

    ms = {"cufa": 0.01, "pages of 16": 0.011, "pages of 64": 0.011, "pages of 256": 0.011}
    more = {"unified": 0.009, "unified, taken again": 0.02}

    def capture(call: Call, calls: int) -> Call:
        found = call()
        return lambda: found * calls

    def ready(*sets: Cell, older: bool) -> Any:
        figures = {**ms, **more, "fa2": 0.025}
        if sets[0].causal:
            figures = dict(list(ms.items())[:3])
        if older:
            figures |= {f"{name}, before": 2 * figures[name] for name in ms if name in figures}
        calls: dict[str, Any] = {name: lambda x=x: x for name, x in figures.items()}
        # 33.5 or 537 MB each: what is read between two uses fills L2 often.
        assert len(sets) == (51 if sets[0].b == 1 else 5)
        return contestants.Ready(sets[0], VARIANT, calls, dict.fromkeys(figures, 1e-3))

    monkeypatch.setattr(decode, "cupy", MagicMock())
    current = SimpleNamespace(l2_bytes=50 << 20)
    monkeypatch.setattr(decode.devices, "current", lambda: current)
    monkeypatch.setattr(decode, "Operands", lambda cell, rng: cell)
    monkeypatch.setattr(decode.graphs, "capture", capture)
    monkeypatch.setattr(decode, "free_memory", lambda: None)
    monkeypatch.setattr(decode, "taken_again", lambda cell, way: int(way.unified_max))

    def rows(*cells: Cell, older: bool = False) -> list[dict[str, Any]]:
        field: Any = SimpleNamespace(ready=partial(ready, older=older))
        return list(decode.rows(field, cells, PlayedClock(), Budget(rounds=2), seed=1))

    return rows


def test_rows(rows_of: Callable[..., list[dict[str, Any]]]) -> None:
    whole, *paged = rows_of(ONE, FOUR)
    assert {name: whole[name] for name in Cell._fields} == ONE.row()
    assert (whole["kv"], whole["page_size"], whole["mode"]) == (8192, 0, "exact")
    assert (whole["unit"], whole["cufa"], whole["peers"]) == ("us", 10.0, {"fa2": 25.0})
    # 8 heads of 8192 keys, K and V, 256 bytes each
    assert whole["cufa_gbs"] == pytest.approx(8 * 8192 * 512 / 10e3, rel=1e-4)
    assert whole["replayed"] == ["cufa", "fa2"]
    unified, again, *paged = paged
    assert (unified["mode"], unified["cufa"], unified["taken_again"]) == ("unified", 9.0, 0)
    assert unified["peers"] == {"fa2": 25.0, "exact": 10.0}
    assert (again["cufa"], again["unified_max"], again["taken_again"]) == (20.0, 1000.0, 1000)
    assert [row["page_size"] for row in paged] == [16, 64, 256, 0, 16, 64]
    assert paged[0]["cufa"] == 11.0
    assert paged[0]["peers"] == {"fa2": 25.0, "exact": 10.0}
    assert paged[3]["peers"] == {}
    assert paged[4]["peers"] == {"exact": 10.0}


def test_an_older_package_decodes_in_the_same_ways(
    rows_of: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    found = rows_of(ONE, older=True)
    peers = {(row["mode"], row["page_size"]): row["peers"] for row in found}
    assert peers["exact", 0] == {"fa2": 25.0, "before": 20.0}
    assert peers["exact", 16] == {"fa2": 25.0, "exact": 10.0, "before": 22.0}
    assert peers["unified", 0] == {"fa2": 25.0, "exact": 10.0}
    assert "| exact | 16 | before | 1 | 2.000 | 2.000 |" in page_of(tmp_path, "decode", found)


def test_page(rows_of: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    text = page_of(tmp_path, "decode", rows_of(ONE, FOUR))
    assert text.startswith("# Decoding on NVIDIA H200\n")
    assert "| exact | 0 | fa2 | 1 | 2.500 | 2.500 | D 128, full, S 1x8192 |" in text
    assert "| exact | 16 | exact | 2 | 0.909 | 0.909 |" in text
    assert "| unified | 0 | exact | 1 | 1.111 | 1.111 |" in text
    assert "| exact | 64 | bfloat16 | 128 | causal | 4x8192 | 16 | 32/8 | decode | 11.0 |" in text


@pytest.mark.gpu
def test_contestants_compute_the_same(cupy: Any) -> None:
    from benchmarks import decode

    from cufa.explorer.clock import CudaClock

    pytest.importorskip("torch")
    few = [ONE._replace(b=2, sk=1024), FOUR._replace(b=2, sk=512)]
    field = decode.Decoders(["fa2"], cufa)
    rows = list(decode.rows(field, few, CudaClock(rest_s=0), Budget(rounds=2), seed=1))
    assert [row["page_size"] for row in rows] == [0, 0, 0, 16, 64, 256] * 2
    again = [row["taken_again"] for row in rows if row["mode"] != "exact"]
    assert again[0] == again[2] == 0
    assert again[1] > 0
    assert again[3] > 0
    for row in rows:
        assert "cufa" in row["replayed"]
        assert ("before" in row["peers"]) == (row["mode"] == "exact")
        for error in (row["cufa_maxerr"], *row["peers_maxerr"].values()):
            assert error < 0.03
