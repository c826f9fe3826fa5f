"""bench.py regret: what is drawn, who races, rows and pages, with a played GPU."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import drawn, results
from benchmarks.cells import Cell
from benchmarks.race import CaptureError
from played_stage import PlayedStage
from test_bench import HEAD
from test_bench_tables import page_of

from cufa import device as devices
from cufa.compiler.nvrtc import CompileError
from cufa.explorer.clock import Call
from cufa.explorer.subject import Subject
from cufa.planner.plan import plan_tiles
from cufa.specs.variant import Variant

H200 = devices.named("h200")
CELL = Cell("bfloat16", 1, 2, 1, 17, 33, 64, 64, True)

# A row, but for the cell.
FOUND = {"seed": 1, "variants": 7, "planned": "a", "planned_us": 12.0, "best": "b", "best_us": 10.0}

# what is drawn


def test_draws_are_within_bounds() -> None:
    cells = drawn.cells(1, 400)
    assert len(set(cells)) == 400
    for cell in cells:
        group, rest = divmod(cell.hq, cell.hk)
        assert rest == 0
        assert 1 <= group <= 16
        assert 1 <= cell.b <= 64
        assert cell.hq <= 128
        assert 16 <= min(cell.sq, cell.sk) <= max(cell.sq, cell.sk) <= 32768
        assert 4 * cell.b * cell.hq * cell.sq * cell.sk * cell.d <= 2**37
        assert (cell.dtype, cell.dv) == ("bfloat16", cell.d)
    assert {(cell.d, cell.dv) for cell in cells} == set(drawn.HEAD_DIMS)
    assert 150 < sum(cell.causal for cell in cells) < 250
    assert max(cell.b for cell in cells) > 50
    assert max(max(cell.sq, cell.sk) for cell in cells) > 20000
    assert {(cell.d, cell.dv) for cell in drawn.cells(1, 20, ((192, 128),))} == {(192, 128)}


def test_a_seed_draws_the_same_everywhere() -> None:
    assert drawn.cells(1, 60)[:2] == [
        Cell("bfloat16", 24, 61, 61, 111, 699, 80, 80, False),
        Cell("bfloat16", 1, 9, 1, 9367, 433, 128, 128, True),
    ]
    assert drawn.cells(1, 60) == drawn.cells(1, 100)[:60]
    assert not set(drawn.cells(1, 60)) & set(drawn.cells(2, 60))


def test_parts_are_all_of_them() -> None:
    cells = drawn.cells(1, 60)
    parts = [drawn.part_of(cells, index, 7) for index in range(1, 8)]
    assert collections.Counter(cell for part in parts for cell in part) == dict.fromkeys(cells, 1)
    dims = [cell.d for part in parts for cell in part]
    assert dims == sorted(dims)


# who races


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what runs the benchmark for `CELL`; it is told what some tiles do, others take 3 ms.

    In a graph all take half as long.
    """
    pytest.importorskip("cupy")
    from benchmarks import contestants, regret

    def compile_all(variants: list[Variant], arch: str) -> Any:
        assert arch == "sm_90a"
        assert len(set(variants)) == len(variants)
        for variant in variants:
            word = says(variant)
            if word == "uncompiled":
                yield SimpleNamespace(variant=variant, compiled=CompileError(variant, (), "bad"))
            else:
                compiled = regret.Compiled(word.encode(), 1, 0, 0, 0, 0, 1, "")
                yield SimpleNamespace(variant=variant, compiled=compiled)

    def capture(call: Call, calls: int) -> Call:
        ms = call()
        if ms == 0.75:
            raise CaptureError("it waits")
        return lambda: ms / 2 * calls

    told: dict[tuple[int, int], str] = {}

    def says(variant: Variant) -> str:
        if variant == planned:
            return told.get((0, 0), "right 1.2")
        if (variant.stages, variant.blocks_per_sm) != (2, 1) or variant.ping_pong:
            return "right 3"
        return told.get((variant.bm, variant.bn), "right 3")

    planned = plan_tiles(CELL.problem, H200).variant
    clock = PlayedStage(Subject(CELL.problem, H200)).clock(0)
    monkeypatch.setattr(regret.devices, "current", lambda: H200)
    monkeypatch.setattr(regret, "Stage", PlayedStage)
    monkeypatch.setattr(regret, "CudaClock", lambda rest_s: clock)
    monkeypatch.setattr(regret, "compile_all", compile_all)
    monkeypatch.setattr(regret.graphs, "capture", capture)
    monkeypatch.setattr(contestants, "free_memory", lambda: None)

    def run(kernels: Sequence[str] | None = None, **tiles: str) -> Any:
        for name, word in tiles.items():
            bm, _, bn = name[1:].partition("x")
            told[int(bm), int(bn)] = word
        field = regret.Regret([CELL], 3, kernels)
        return list(field.rows()), field.failed, planned

    return run


def test_rows(rows_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    (row,), failed, planned = rows_of(
        _128x96="right 1.0",
        _128x128="right 1.1",
        _128x64="wrong 0.9",
        _128x80="uncompiled",
        _128x112="illegal",
        _128x48="right 0.75",  # which no graph takes
    )
    assert failed == 0
    assert {name: row[name] for name in Cell._fields} == CELL.row()
    assert (row["seed"], row["planned"], row["planned_us"]) == (3, str(planned), 600.0)
    best = Variant.parse(row["best"])
    assert (best.bm, best.bn, row["best_us"]) == (128, 96, 500.0)
    out, err = capsys.readouterr()
    assert f"1 problems, {row['variants'] + 2} variants to compile" in out
    assert err.count("does not compile") == err.count("cannot: it is for float32") == 1
    assert err.count("is left out: it waits") == err.count("is wrong: error") == 1


@pytest.mark.parametrize("word", ["wrong 1.2", "uncompiled", "illegal", "right 0.75"])
def test_without_the_planners_choice_there_is_no_row(
    word: str, rows_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows, failed, _ = rows_of(_0x0=word)
    assert rows == []
    assert failed == 1
    assert "left out, as the planner's choice is" in capsys.readouterr().err


# pages


def test_page(tmp_path: Path) -> None:
    one = plan_tiles(CELL.problem, H200).variant
    row = {**CELL.row(), **FOUND, "planned": str(one), "best": str(one._replace(bm=64))}
    same = {**row, "sq": 18, "best": row["planned"], "best_us": 12.0}
    result: dict[str, Any] = {**HEAD, "bench": "regret", "rows": [same, row, {**same, "seed": 2}]}
    text = page_of(tmp_path, "regret", result["rows"])
    assert text.startswith("# The planner's choice and the fastest variant on NVIDIA H200\n")
    assert "| 1 | 2 | 1.095 | 1.200 |\n| 2 | 1 | 1.000 | 1.000 |" in text
    assert text.index("| 1.200 |\n| bfloat16 | 64 | causal | 18x33 |") > 0
    # Another seed's rows stay, and of the same seed those that are measured again go.
    again = {**result, "rows": [{**row, "best_us": 11.0}]}
    whole = results.merged(result, again)
    assert [(r["seed"], r["best_us"]) for r in whole["rows"]] == [(1, 12.0), (2, 12.0), (1, 11.0)]
    with pytest.raises(ValueError, match=r"rows\[0\].best_us is missing"):
        results.validate({**result, "rows": [{n: v for n, v in row.items() if n != "best_us"}]})


# on a GPU


@pytest.mark.gpu
def test_a_race(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few variants race, as others take long to compile."""
    from benchmarks import regret

    from cufa.explorer.space import variants

    few = [drawn.cells(1, 60)[12], CELL]
    monkeypatch.setattr(regret, "variants", lambda *problem: variants(*problem)[:4])
    field = regret.Regret(few, seed=1)
    rows = list(field.rows())
    assert field.failed == 0
    for row, cell in zip(rows, few, strict=True):
        assert {name: row[name] for name in Cell._fields} == cell.row()
        assert 0.5 < row["best_us"] <= row["planned_us"] < 1000
        assert 1 <= row["variants"] <= 5
