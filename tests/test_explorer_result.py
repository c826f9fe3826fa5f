"""explorer/result.py, exploration.py, table.py and work.py: order, exports and text."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from pathlib import Path
from typing import Any

import findings
import pytest

from cufa.explorer.exploration import Exploration
from cufa.explorer.result import Row, ranked
from cufa.explorer.table import lines, tile_text
from cufa.explorer.work import flops, nbytes
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

SHAPE = (2, 4, 1000, 64)
PROBLEM = Problem.of_shapes(SHAPE, SHAPE, SHAPE, dtype="bfloat16", causal=True)


def variant_of(bn: int) -> Variant:
    return Variant("fa2_mma", "bfloat16", 64, 64, 64, bn, 2, 4, 2, score=("Causal",))


def compiled(bn: int, **figures: Any) -> Row:
    return findings.compiled(variant_of(bn), **figures)


def timed(bn: int, us: float, **figures: Any) -> Row:
    return findings.timed(variant_of(bn), us, **figures)


def exploration(rows: list[Row], ceilings: dict[str, float] | None = None) -> Exploration:
    return findings.exploration(PROBLEM, rows, variant_of(64), ceilings)


IN_ORDER = [
    timed(16, 10.0),
    timed(32, 20.0),
    compiled(128, expected_us=30.0, spill_bytes=8),
    compiled(144, expected_us=40.0),
    compiled(48),
    compiled(64, occupancy=0.0625),
    compiled(80, spill_bytes=8, occupancy=0.5),
    timed(96, 5.0, correct=False),
    Row(variant_of(112), error="it does not compile"),
]


def test_a_switch_is_shown_beside_the_kernel() -> None:
    variant = Variant(
        "fa3_wgmma", "bfloat16", 128, 128, 192, 80, 2, 16, 1, ping_pong=True, score=("Causal",)
    )
    assert lines([Row(variant)])[1][0] == "fa3_wgmma ping_pong"
    assert tile_text(variant) == "fa3_wgmma 192x80 2/16/1 ping_pong"
    other = variant._replace(ping_pong=False)
    assert lines([Row(other)])[1][0] == "fa3_wgmma"
    assert tile_text(other) == "fa3_wgmma 192x80 2/16/1"


def test_order() -> None:
    shuffled = random.Random(1).sample(IN_ORDER, len(IN_ORDER))
    assert ranked(shuffled) == IN_ORDER
    assert exploration(shuffled).rows == IN_ORDER


def test_best_is_the_fastest_correct_one() -> None:
    assert exploration(IN_ORDER).best == IN_ORDER[0]
    assert exploration(IN_ORDER[2:]).best is None
    assert exploration([]).best is None


def test_dict_is_flat_and_complete() -> None:
    whole = exploration(IN_ORDER, ceilings={"read_gbs": 4000.0}).to_dict()
    assert whole["version"] == 3
    assert whole["problem"] == PROBLEM.to_dict()
    assert whole["device"]["name"] == "h200"
    assert (whole["arch"], whole["compiler"]) == ("sm_90a", "NVRTC 13.0")
    assert Variant.parse(whole["planned"]) == variant_of(64)
    assert whole["ceilings"] == {"read_gbs": 4000.0}
    first = whole["rows"][0]
    assert first["kernel"] == "fa2_mma"
    assert (first["score"], first["kv"]) == (["Causal"], "Dense")
    assert (first["min_blocks_per_sm"], first["blocks_per_sm"]) == (2, 2)
    assert (first["median_us"], first["correct"], first["error"]) == (10.0, True, None)
    names = {*Variant._fields, *Row._fields, "min_blocks_per_sm"} - {"variant"}
    assert all(set(row) == names for row in whole["rows"])


def test_json_round_trip(tmp_path: Path) -> None:
    found = exploration(IN_ORDER)
    text = found.to_json(tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == text
    assert json.loads(text) == found.to_dict()
    assert sum('"kernel"' in line for line in text.splitlines()) == len(IN_ORDER)


def test_json_of_nothing_and_of_numbers_that_it_has_not() -> None:
    assert json.loads(exploration([]).to_json())["rows"] == []
    wrong = timed(16, 1.0, correct=False)._replace(max_error=math.inf, spread=math.nan)
    (row,) = json.loads(exploration([wrong]).to_json())["rows"]
    assert (row["max_error"], row["spread"], row["correct"]) == (None, None, False)


def test_csv_round_trip(tmp_path: Path) -> None:
    noted = IN_ORDER[0]._replace(notes=("C7512 slow, and how", "C7513 slower"))
    found = exploration([noted, *IN_ORDER[1:]])
    text = found.to_csv(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == text
    rows = list(csv.DictReader(io.StringIO(text)))
    for read, row in zip(rows, found.to_dict()["rows"], strict=True):
        for name in ("notes", "score"):
            assert read.pop(name) == "; ".join(row.pop(name))
        assert read == {name: "" if x is None else str(x) for name, x in row.items()}


def test_table_without_timings() -> None:
    rows = [compiled(48), compiled(64, expected_us=7.25), Row(variant_of(112), error="too large")]
    lines = str(exploration(rows)).splitlines()
    assert lines[0] == "bfloat16, batch 2, heads 4, seq 1000, head dim 64, causal"
    assert "3 variants for sm_90a (h200), NVRTC 13.0" in lines[1]
    head, planned, good, bad = lines[3:]
    assert "TFLOP/s" not in head.split()
    assert planned.endswith("7.2  planned")
    expected = "fa2_mma 64 64x48 2 4 2 100 0 32.1 2 12% 20.0 0.31 -"
    assert good.split() == expected.split()
    assert bad.split()[:6] == ["fa2_mma", "64", "64x112", "2", "4", "2"]
    assert bad.endswith("-  too large")
    assert good.index("100") + 3 == head.index("regs") + 4  # numbers stand to the right


def test_table_with_timings() -> None:
    text = str(exploration([timed(48, 12.34), timed(64, 5.0, correct=False)]))
    _, good, wrong = text.splitlines()[3:]
    assert good.split()[-6:] == ["12.3", "1.0%", "100.0", "200", "50%", "1.0e-03"]
    assert wrong.endswith("wrong result")


def test_table_of_nothing() -> None:
    assert "0 variants" in str(exploration([]))


@pytest.mark.parametrize("causal", [False, True])
def test_work_of_a_problem(causal: bool) -> None:
    problem = Problem.of_shapes(
        (2, 8, 100, 64), (2, 4, 300, 64), (2, 4, 300, 32), dtype="float32", causal=causal
    )
    assert flops(problem) == 2 * 16 * 100 * 300 * (64 + 32) / (2 if causal else 1)
    q, k, v, o = 2 * 8 * 100 * 64, 2 * 4 * 300 * 64, 2 * 4 * 300 * 32, 2 * 8 * 100 * 32
    assert nbytes(problem) == 4 * (q + k + v + o)
