"""bench.py fp8: cells, rows and pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import results
from benchmarks.accuracy import max_errors, rms_errors
from benchmarks.cells import Cell, fp8_cells
from benchmarks.options import FP8_PEERS
from reference import oracle, random_inputs
from test_bench import HEAD
from test_bench_tables import page_of

PEERS = {"fa3_fp8": 900.0, "cudnn_bf16": 660.0, "cufa_bf16": 640.0}
ERRORS = dict.fromkeys(PEERS, 2e-3)
ROW: dict[str, Any] = {
    **{"dtype": "bfloat16", "b": 2, "hq": 16, "hk": 16, "sq": 8192, "sk": 8192},
    **{"d": 128, "dv": 128, "causal": True, "kernel": "fp8_wgmma", "unit": "TFLOP/s"},
    **{"cufa": 800.0, "peers": PEERS, "s": 8192, "rmse": 1e-3, "max_error": 2e-2},
    **{"cufa_maxerr": 2e-2, "peers_maxerr": ERRORS, "cufa_rmse": 1e-3, "peers_rmse": ERRORS},
    **{"from_16_bits": 704.0, "quantize_gbs": 3900.0, "copy_gbs": 4100.0},
    "replayed": ["cufa", *PEERS],
}


def test_cells() -> None:
    cells = fp8_cells()
    assert len(set(cells)) == 24
    assert {cell.d for cell in cells} == {64, 128, 256}
    assert all(cell.b * cell.sq == 16384 and cell.hq * cell.d == 2048 for cell in cells)
    assert {cell.d for cell in fp8_cells([64])} == {64}


def test_peers_and_bytes() -> None:
    pytest.importorskip("cupy")
    from benchmarks import fp8

    assert tuple(fp8.MAKERS) == FP8_PEERS
    cell = Cell("bfloat16", 2, 4, 2, 300, 500, 64, 64, False)
    elements = 2 * (4 * 300 + 2 * 2 * 500) * 64
    moved = fp8.moved_bytes(cell)
    assert moved == 3 * elements + 4 * 2 * (4 * 3 + 2 * 2 * 4)
    copied = fp8.copied_bytes(cell)
    assert copied % 2**20 == 0
    assert 0 <= 2 * copied - moved < 2**21


def test_root_mean_square_errors(rng: np.random.Generator) -> None:
    cell = Cell("float32", 2, 4, 2, 30, 50, 16, 16, True)
    q, k, v = random_inputs(rng, "float32", b=2, hq=4, hk=2, sq=30, sk=50, d=16)
    exact, _ = oracle(q, k, v, causal=True)
    found = {"one": exact, "two": exact + 0.5}
    errors = rms_errors(np, cell, (q, k, v), found)
    assert errors["one"] < 1e-6
    assert errors["two"] == pytest.approx(0.5, rel=1e-6)
    assert max_errors(np, cell, (q, k, v), found)["two"] == pytest.approx(0.5, rel=1e-6)


def test_a_page(tmp_path: Path) -> None:
    results.validate({**HEAD, "bench": "fp8", "rows": [ROW]})
    row = {name: x for name, x in ROW.items() if name != "rmse"}
    with pytest.raises(ValueError, match="rmse is missing"):
        results.validate({**HEAD, "bench": "fp8", "rows": [row]})
    text = page_of(tmp_path, "fp8", [ROW, {**ROW, "d": 64, "dv": 64}])
    assert "# 8 bits on" in text
    assert "| 704.0 | 1.10 | 3900 | 0.95 | 1.00e-03 | 2.00e-03 |" in text


def test_a_page_of_errors(tmp_path: Path) -> None:
    row = {"data": "lengths", "d": 64, "s": 1024, "kernel": "fp8_wgmma", "granularity": "block"}
    row |= {"hadamard": True, "rmse": 1e-3, "relative": 0.02}
    rows = [row, {**row, "data": "needles", "s": 131072, "found": 200, "draws": 200}]
    results.validate({**HEAD, "bench": "fp8-error", "rows": rows})
    assert results.figures(row) == "rmse 0.001, 2.00% of the result"
    text = page_of(tmp_path, "fp8-error", rows)
    assert "# Errors of 8 bits on" in text
    assert (
        "| needles | 64 | 131072 | fp8_wgmma | block | yes | 1.00e-03 | 2.00% | 200/200 |" in text
    )


def test_errors_of_the_worst_chunk() -> None:
    pytest.importorskip("cupy")
    from benchmarks.fp8_error import errors

    exact = np.ones((1, 1, 16, 4))
    out = exact.copy()
    out[0, 0, 2:4] += 0.5
    rmse, whole = errors(out, exact, False)
    assert rmse == whole == pytest.approx(0.5 * 8**-0.5)
    assert errors(out, exact, True) == (pytest.approx(rmse), pytest.approx(0.5))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_run_for_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import fp8_error

    monkeypatch.setattr(fp8_error, "LENGTHS", (1 << 10, 1 << 12))
    monkeypatch.setattr(fp8_error, "HEAD_DIMS", (64,))
    rows = [row for row in fp8_error.rows(1) if row["kernel"] == fp8_error.OURS]
    assert [row["data"] for row in rows] == [
        *["outliers"] * 5,
        *["magnitudes"] * 5,
        *["lengths"] * 2,
        "needles",
    ]
    assert rows[-1]["found"] == rows[-1]["draws"]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_run() -> None:
    """Every cell runs, on a few tokens."""
    from benchmarks import fp8
    from benchmarks.race import Budget

    from cufa.explorer.clock import CudaClock

    few = [cell._replace(b=1) for cell in fp8_cells() if cell.sq == 512]
    eight = fp8.EightBits(["cufa_bf16"])
    rows = list(fp8.rows(eight, few, CudaClock(rest_s=0), Budget(rounds=2), seed=1))
    assert [row["d"] for row in rows] == [cell.d for cell in few]
    for row in rows:
        assert row["kernel"] == "fp8_wgmma"
        assert 0 < row["rmse"] < row["max_error"] < 0.3
        assert row["from_16_bits"] > 0 < row["cufa"]
