"""The benchmark of the package as it was and as it is, as far as it goes without a GPU."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from benchmarks import before, results
from benchmarks.cells import FAMILIES, SEQS, Cell
from benchmarks.report import write_report
from test_bench import HEAD
from test_bench_tables import PlayedClock

import cufa
from cufa.compiler import source
from cufa.explorer.clock import Call


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Return a folder with the package as it is, but for its version and a comment in a header."""
    package = Path(cufa.__file__).parent
    copy = tmp_path / "older"
    shutil.copytree(package, copy / "cufa", ignore=shutil.ignore_patterns("__pycache__"))
    edit(copy / "cufa" / "__init__.py", r'__version__ = ".*"', '__version__ = "0.0"')
    edit(copy / "cufa" / "kernels" / "params.cuh", r"\Z", "// as it was\n")
    return copy


def edit(path: Path, pattern: str, text: str) -> None:
    path.write_text(re.sub(pattern, text, path.read_text()))


# the older package next to the present one


def test_both_packages_work_in_one_process(older: Path) -> None:
    x = np.ones((3, 8), np.float32)
    modules = {name: module for name, module in sys.modules.items() if name.startswith("cufa")}
    with before.loaded(str(older)) as package:
        assert package.__version__ == "0.0" != cufa.__version__
        assert (package.attention(x, x, x) == cufa.attention(x, x, x)).all()
        assert type(package.explain(x, x, x)) is not type(cufa.explain(x, x, x))
        theirs = importlib.import_module(f"{before.NAME}.compiler.source")
        assert "// as it was\n" in theirs.text("fa2_mma")
        assert "// as it was\n" not in source.text("fa2_mma")
    assert modules.items() <= sys.modules.items()
    assert not any(name.startswith(before.NAME) for name in sys.modules)
    assert not any(before.NAME in part for part in sys.path)


def test_the_older_package_imports_nothing_of_the_present_one(older: Path) -> None:
    """Neither when it is imported nor later: some imports are inside functions."""
    with before.loaded(str(older)) as package:
        assert package.__file__ is not None
        for path in Path(package.__file__).parent.rglob("*.py"):
            text = path.read_text()
            assert not re.search(r"^\s*(from|import) cufa\b", text, re.MULTILINE), path
            assert '"cufa.' not in text, path
        mine = [m for n, m in sys.modules.items() if n.split(".")[0] == before.NAME]
        assert len(mine) > 10
        for module in mine:
            for name, value in vars(module).items():
                home = value.__name__ if isinstance(value, ModuleType) else None
                home = home or getattr(value, "__module__", None) or ""
                assert str(home).split(".")[0] != "cufa", (module, name)


def test_neither_finds_what_the_user_has_compiled(
    older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFA_CACHE_DIR", "that of the user")
    with before.beside(str(older)) as package:
        assert package.__version__ == "0.0"
        assert not list(Path(os.environ["CUFA_CACHE_DIR"]).iterdir())
    assert os.environ["CUFA_CACHE_DIR"] == "that of the user"
    monkeypatch.delenv("CUFA_CACHE_DIR")
    with before.beside(str(older)):
        assert "CUFA_CACHE_DIR" in os.environ
    assert "CUFA_CACHE_DIR" not in os.environ


def test_what_the_older_package_is_called(older: Path, tmp_path: Path) -> None:
    assert before.resolve(str(older)) == "older"
    with pytest.raises(ValueError, match="holds no package cufa"):
        before.resolve(str(tmp_path))
    with pytest.raises(ValueError, match="no-such-revision"):
        before.resolve("no-such-revision")


def test_a_revision(monkeypatch: pytest.MonkeyPatch, older: Path) -> None:
    """The package as git has it, and not as it lies in the folder."""

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=older, check=True, capture_output=True, text=True
        ).stdout.strip()

    if shutil.which("git") is None:
        pytest.skip("no git")
    git("init", "-q")
    git("add", "cufa")
    git("commit", "-q", "-m", "as it was")
    edit(older / "cufa" / "__init__.py", r'__version__ = ".*"', '__version__ = "0.1"')
    monkeypatch.setattr(before, "ROOT", older)
    assert before.resolve("HEAD") == git("rev-parse", "HEAD")
    with before.loaded("HEAD") as package:
        assert package.__version__ == "0.0"


# the tables


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, older: Path) -> Any:
    """Play a GPU on which cufa takes `ms`, and the package before 1.1 times that."""
    pytest.importorskip("cupy")
    from benchmarks import contestants, refactor

    def call_of(cell: Cell, kernel: str | None, package: ModuleType) -> Call:
        """Return a call as a played GPU has it; before cannot run a head dim of 256."""
        asked.append((kernel, cell))
        if package.__version__ != "0.0":
            return lambda: game.ms
        if cell.d == 256:
            raise ValueError("head_dim must be less")
        return lambda: 1.1 * game.ms

    def capture(call: Call, calls: int) -> Call:
        ms = call()
        return lambda: ms / 2 * calls

    asked: list[tuple[str | None, Cell]] = []
    game = SimpleNamespace(ms=1.0, asked=asked, graphs=refactor.graphs)
    game.run = lambda older: refactor.Refactor(str(older), rounds=3, seed=1)
    monkeypatch.setattr(refactor, "cupy", MagicMock())
    monkeypatch.setattr(refactor, "CudaClock", lambda rest_s: PlayedClock())
    monkeypatch.setattr(refactor, "Operands", lambda cell, rng: cell)
    monkeypatch.setattr(contestants, "free_memory", lambda: None)
    monkeypatch.setattr(refactor.graphs, "capture", capture)
    monkeypatch.setattr(refactor, "cufa_call", call_of)
    monkeypatch.setattr(refactor.devices, "current", lambda: refactor.devices.named("h200"))
    monkeypatch.setenv("CUFA_CACHE_DIR", "that of the user")
    return game


def test_rows_of_two_tables(played: Any, older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    field = played.run(older)
    rows = list(field.rows(["prefill", "fp32"], [64], [512, 1024]))
    assert [(r["dtype"], r["d"], r["causal"], r["sq"]) for r in rows] == [
        (dtype, 64, causal, s)
        for dtype in ("bfloat16", "float32")
        for causal in (False, True)
        for s in (512, 1024)
    ]
    assert [kernel for kernel, _ in played.asked] == [None] * 8 + ["fa2_fp32"] * 8
    assert [r["family"] for r in rows] == ["prefill"] * 4 + ["fp32"] * 4
    for row in rows:
        assert row["peers"]["before"] / row["cufa"] == pytest.approx(1.1, rel=1e-4)
        assert "replayed" not in row
    assert field.failed == 0
    said = capsys.readouterr().out
    for name in ("prefill", "fp32"):
        line = f"{name}: 4 cells, 1.1000 times as fast as before in geometric mean, 1.1000 at least"
        assert said.count(line) == 1
    results.validate({**HEAD, "bench": "refactor", "rows": rows})


def test_short_calls_are_replayed(played: Any, older: Path) -> None:
    played.ms = 0.1
    (row,) = list(played.run(older).rows(["mma"], [64], [512]))[:1]
    assert row["replayed"] == ["cufa", "before"]
    assert row["peers"]["before"] / row["cufa"] == pytest.approx(1.1, rel=1e-4)
    assert played.asked[0][0] == "fa2_mma"


def test_cells_that_one_cannot_run_are_counted(
    played: Any, older: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    field = played.run(older)
    assert list(field.rows(["fp16"], [256], [512])) == []
    assert field.failed == 2
    assert "float16 d256 causal s512 b32 h8: left out" in capsys.readouterr().err


def test_families_have_the_cells_of_their_benchmarks() -> None:
    pytest.importorskip("cupy")
    from benchmarks import decode, masks, model_shapes, refactor

    found = {name: refactor.cases(name, None, SEQS, 50 << 20) for name in FAMILIES}
    sizes = {name: len(cases) for name, cases in found.items()}
    assert sizes == {
        **{"prefill": 36, "fp16": 36, "mma": 36, "fp32": 24},
        "models": len(model_shapes.SHAPES),
        "masks": len(masks.cases()),
        "decode": 4 * len(decode.cells()),
    }
    for cases in found.values():
        assert len({str(case) for case in cases}) == len(cases)


# result files


def row(sq: int, kernel: str, cufa: float = 100.0) -> dict[str, Any]:
    cell = Cell("bfloat16", 16384 // sq, 16, 16, sq, sq, 128, 128, False)
    figures = {"kernel": kernel, "unit": "TFLOP/s", "cufa": cufa, "peers": {"before": 100.0}}
    return {"family": "prefill" if kernel == "fa3_wgmma" else "mma", **cell.row(), **figures}


def part(rows: list[dict[str, Any]], **head: Any) -> dict[str, Any]:
    return {**HEAD, "bench": "refactor", "before": "abc", **head, "rows": rows}


def test_parts_of_a_run_are_merged() -> None:
    first = part([row(512, "fa3_wgmma", 90), row(1024, "fa3_wgmma")], command="one")
    again = part([row(512, "fa3_wgmma", 110), row(512, "fa2_mma")], command="two")
    whole = results.merged(first, again)
    assert [(r["sq"], r["kernel"], r["cufa"]) for r in whole["rows"]] == [
        (1024, "fa3_wgmma", 100.0),
        (512, "fa3_wgmma", 110),
        (512, "fa2_mma", 100.0),
    ]
    assert whole["command"] == "one && two"
    assert results.merged(whole, again)["command"] == "one && two"
    results.validate(whole)
    for name in ("before", "commit", "device"):
        with pytest.raises(ValueError, match=f"{name} is 'other', and was"):
            results.merged(first, part([], **{name: "other"}))


def test_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "h200-refactor.json"
    results.write(path, part([row(512, "fa3_wgmma", 99.5), row(1024, "fa2_mma", 102.0)]))
    page, plot = write_report(path)
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.startswith("# The standard tables before and after on NVIDIA H200\n")
    assert "- before: abc\n" in text
    assert "| prefill | before | 1 | 0.995 | 0.995 | D 128, full, S 512 |" in text
    assert "| mma | before | 1 | 1.020 | 1.020 | D 128, full, S 1024 |" in text
    assert "| 99.5 | 100.0 | 0.995 |" in text
