"""The figure of what the scores' distribution does to the speed, from several result files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench
import pytest
from benchmarks import results, scores
from benchmarks.cells import standard_cells
from test_bench import HEAD

FILES = {
    "prefill": ("bfloat16", (512, 1024, 2048)),
    "prefill-fp16": ("float16", (512, 1024)),
    "prefill-sharp": ("bfloat16", (512, 1024)),
    "prefill-rising": ("float16", (512, 1024)),
}


def write(folder: Path, name: str) -> None:
    """Write a result file in which cufa is 1.5 times as fast as cuDNN."""
    dtype, seqs = FILES[name]
    figures = {"kernel": "fa3_wgmma", "unit": "TFLOP/s", "cufa": 300.0}
    rows: list[dict[str, Any]] = [
        {**cell.row(), **figures, "peers": {"cudnn": 200.0} if cell.d == 64 else {}}
        for cell in standard_cells(dtype, (64, 128), seqs)
    ]
    results.write(folder / f"h200-{name}.json", {"bench": "prefill", **HEAD, "rows": rows})


def test_report_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    for name in FILES:
        write(tmp_path, name)
    assert bench.main(["report"]) == 0
    plot = tmp_path / "h200-prefill-scores.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.endswith(f"{plot}\n")
    plot.unlink()
    assert bench.main(["report", str(tmp_path / "h200-prefill.json")]) == 0
    assert not plot.exists()


@pytest.mark.parametrize("missing", ["prefill-sharp", "prefill-rising"])
def test_it_takes_a_file_of_every_kind(tmp_path: Path, missing: str) -> None:
    for name in FILES:
        if name != missing:
            write(tmp_path, name)
    assert scores.write_figures(tmp_path) == []


def test_one_dtype_is_enough(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("prefill", "prefill-sharp", "prefill-rising"):
        write(tmp_path, name)
    assert scores.write_figures(tmp_path) == [tmp_path / "h200-prefill-scores.png"]
