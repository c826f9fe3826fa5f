"""The README's table of speed says what the result files say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def result(bench: str) -> list[dict[str, Any]]:
    """Return the rows of a result file."""
    rows: list[dict[str, Any]] = json.loads(
        (ROOT / f"docs/benchmarks/h200-{bench}.json").read_text(encoding="utf-8")
    )["rows"]
    return rows


def test_there_are_such_rows() -> None:
    assert len(list(table())) >= 10


@pytest.mark.parametrize(("name", "dtype", "cells"), list(table()))
def test_row(name: str, dtype: str, cells: list[str]) -> None:
    rows = result(Path(name).stem.removeprefix("h200-"))
    peer, number, *ratios = cells
    found = summarise([row for row in rows if row["dtype"] == dtype])[PEERS[peer.split(" (")[0]]]
    assert number == str(found.cells)
    for said, ratio in zip(ratios, (found.geomean, found.minimum), strict=True):
        decimals = len(said.partition(".")[2])
        assert said == f"{ratio:.{decimals}f}"


def line_with(text: str) -> str:
    """Return the README's one line with this text."""
    (found,) = (
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if text in line
    )
    return found


def test_host_cost() -> None:
    (row,) = result("host")
    said = re.findall(r"([\d.]+) us", line_with("h200-host.md"))
    figures = (row["cufa"], row["peers"]["sdpa"], row["peers"]["floor"])
    assert said == [f"{figure:.1f}" for figure in figures]


@pytest.mark.parametrize(
    ("line", "variant", "key"),
    [
        ("h200-jit.md", "bfloat16 .* auto", "cold_s"),
        ("the same, `fa2_mma` or `fa2_fp32`", ".* fa2_mma|float32 .* auto", "cold_s"),
        ("the same, from CuPy's disk cache", ".*", "warm_s"),
    ],
)
def test_first_call(line: str, variant: str, key: str) -> None:
    seconds = [row[key] for row in result("jit") if re.fullmatch(variant, row["variant"])]
    range_ = dict.fromkeys((f"{min(seconds):.2f}", f"{max(seconds):.2f}"))
    assert f"| {' to '.join(range_)} s |" in line_with(line)
