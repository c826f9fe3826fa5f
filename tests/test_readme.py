"""The README's table of speed says what the result files say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.summary import summarise

ROOT = Path(__file__).resolve().parents[1]

PEERS = {
    "PyTorch SDPA, cuDNN": "cudnn",
    "PyTorch SDPA, FlashAttention-2": "fa2",
    "PyTorch SDPA, efficient, TF32 off": "efficient",
    "plain CuPy": "cupy",
}


def table() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the result file, the dtype, and the cells behind them, of each row of ratios."""
    name = dtype = ""
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or cells[1].split(" (")[0] not in PEERS:
            continue
        if cells[0]:
            link = re.search(r"\((docs/benchmarks/[\w-]+)\.md\)", cells[0])
            found = re.search(r"bfloat16|float16|float32", cells[0])
            assert link, line
            assert found, line
            name, dtype = f"{link[1]}.json", found[0]
        yield name, dtype, cells[1:]


def test_there_are_such_rows() -> None:
    assert len(list(table())) >= 10


@pytest.mark.parametrize(("name", "dtype", "cells"), list(table()))
def test_row(name: str, dtype: str, cells: list[str]) -> None:
    rows = json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
    peer, number, *ratios = cells
    found = summarise([row for row in rows if row["dtype"] == dtype])[PEERS[peer.split(" (")[0]]]
    assert number == str(found.cells)
    for said, ratio in zip(ratios, (found.geomean, found.minimum), strict=True):
        decimals = len(said.partition(".")[2])
        assert said == f"{ratio:.{decimals}f}"
