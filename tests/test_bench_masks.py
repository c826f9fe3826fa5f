"""bench.py masks: cases, rows and pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import results
from test_bench import HEAD
from test_bench_tables import page_of

ROW: dict[str, Any] = {
    "feature": "window 1024",
    **{"dtype": "bfloat16", "b": 2, "hq": 16, "hk": 16, "sq": 8192, "sk": 8192},
    **{"d": 128, "dv": 128, "causal": True, "kernel": "auto", "unit": "us"},
    **{"cufa": 200.0, "peers": {"cufa_causal": 800.0, "cudnn": 900.0}},
    "replayed": ["cufa", "cufa_causal", "cudnn"],
}


def test_cases() -> None:
    pytest.importorskip("cupy")
    from benchmarks.masks import cases

    found = cases()
    assert len({str(case) for case in found}) == len(found)
    for case in found:
        assert case.cell.b * case.cell.sq == 16384
        assert case.cell.hq * case.cell.d == 2048
        assert case.cell.causal == (case.feature not in ("bias", "mask", "mask of bits"))


def test_a_page(tmp_path: Path) -> None:
    results.validate({**HEAD, "bench": "masks", "rows": [ROW]})
    text = page_of(tmp_path, "masks", [ROW, {**ROW, "feature": "sinks", "cufa": 810.0}])
    assert "# Masks, biases and unequal lengths on" in text
    assert "| window 1024 | bfloat16 | 128 | causal | 8192 | 2 | 16 | auto | 200.0 |" in text
    assert "4.00" in text


@pytest.mark.gpu
def test_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case runs, on a few tokens."""
    from benchmarks import masks
    from benchmarks.race import Budget

    from cufa.explorer.clock import CudaClock

    few = [
        case._replace(cell=case.cell._replace(sq=512, sk=512))
        for case in masks.cases()
        if case.cell.d == 64 and case.feature != "varlen 16"
    ]
    monkeypatch.setattr(masks, "cases", lambda: few)
    rows = list(masks.rows([], CudaClock(rest_s=0), Budget(rounds=2), seed=1))
    assert [row["feature"] for row in rows] == [case.feature for case in few]
    assert all(row["cufa"] > 0 and row["peers"]["cufa_causal"] > 0 for row in rows)
