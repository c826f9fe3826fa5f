"""cli: `explore`, what it prints, writes and keeps after Ctrl-C."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from findings import CEILINGS, exploration, timed

from cufa import cli, device, explorer
from cufa.cli import table, watch
from cufa.explorer import Interrupted, Progress
from cufa.explorer.exploration import Exploration
from cufa.explorer.result import Row
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

ROOT = Path(__file__).resolve().parents[1]
Q = ("--q", "2,16,1024,64")
VARIANTS = [Variant("fa2_mma", "float16", 64, 64, bm, 64, 2, 4, 2) for bm in (64, 128, 192)]

Captured = pytest.CaptureFixture[str]


ROWS = [timed(v, us) for v, us in zip(VARIANTS, (300.0, 100.0, 200.0), strict=True)]


def known_after(stage: str, row: Row) -> Row:
    """Return what is known of a row after a stage."""
    if stage == "time":
        return row
    untimed = row._replace(median_us=None, spread=None, tflops=None, gbs=None)
    return untimed if stage == "check" else untimed._replace(correct=None, max_error=None)


class Fake:
    """In place of `explorer.explore`: reports a few steps, and returns or is interrupted."""

    def __init__(self, interrupted: bool = False) -> None:
        self.interrupted = interrupted
        self.asked: dict[str, Any] = {}

    def __call__(self, problem: Problem, *, progress: Any, **asked: Any) -> Exploration:
        """Return the exploration."""
        self.asked = asked
        for stage in ("compile", "check", "time"):
            for done, row in enumerate(ROWS, 1):
                progress(Progress(stage, done, len(ROWS), known_after(stage, row)))
        if self.interrupted:
            raise Interrupted(exploration(problem, ROWS[:1], VARIANTS[0], CEILINGS))
        return exploration(problem, ROWS, VARIANTS[0], CEILINGS)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    pytest.importorskip("cupy")
    found = Fake()
    monkeypatch.setattr(explorer, "explore", found)
    return found


def test_a_small_space_for_real(capsys: Captured, tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    target, rows = tmp_path / "x.json", tmp_path / "x.csv"
    words = ["explore", *Q, "--arch", "sm_90a", "--kernel", "fa2_mma"]
    words += ["--variant", str(VARIANTS[2])]
    for axis in ("bm=64", "bn=32,64", "stages=1,2", "warps=4", "blocks_per_sm=2"):
        words += ["--space", axis]
    words += ["--json", str(target), "--csv", str(rows), "--top", "3"]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    found = json.loads(target.read_text())
    assert len(found["rows"]) == 5
    for row in found["rows"]:
        if row["error"] is None:
            assert 32 <= row["registers"] <= 255
            assert row["occupancy"] > 0
            assert row["median_us"] is None
    assert len(list(csv.DictReader(io.StringIO(rows.read_text())))) == 5
    assert "5 variants for sm_90a" in out
    assert "and 2 more" in out
    assert out.count("fa2_mma ") == 3  # the rows; the variants in full have no space there
    assert err.count("compiled ") >= 4
    assert f"wrote {target}\n" in err


def test_a_score_for_real(capsys: Captured) -> None:
    pytest.importorskip("cupy")
    words = ["explore", *Q, "--arch", "sm_90a", "--kernel", "fa2_mma", "--array", "bias:float32"]
    for axis in ("bm=64", "bn=32", "stages=2", "warps=4", "blocks_per_sm=2"):
        words += ["--space", axis]
    assert cli.main([*words, "--array", "mask:uint8"]) == 0
    out, _ = capsys.readouterr()
    assert ", bias, mask\n" in out
    assert "Score<BiasFloat32, MaskBits>" in out


def test_the_best_comes_first(fake: Fake, capsys: Captured) -> None:
    assert cli.main(["explore", *Q, "--gpu", "h200", "--jobs", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip().endswith(f"best: {VARIANTS[1]}")
    assert out.index("100.0") < out.index("200.0") < out.index("300.0")
    assert f"timed 2/3  {VARIANTS[1]}  100.0 us" in err
    assert f"compiled 1/3  {VARIANTS[0]}  100 registers, no spills, 12% occupancy" in err
    assert f"checked 1/3  {VARIANTS[0]}  correct, largest error 1.0e-03" in err
    assert fake.asked["jobs"] == 3
    assert fake.asked["device"] == device.named("h200")


def test_the_space_that_is_explored(fake: Fake) -> None:
    assert cli.main(["explore", *Q, "--gpu", "h200", "--variant", str(VARIANTS[1])]) == 0
    assert fake.asked["space"] == [VARIANTS[1]]
    words = ["explore", *Q, "--gpu", "h200", "--space", "bm=64", "--space", "bn=32"]
    assert cli.main([*words, "--space", "bn=48", "--variant", str(VARIANTS[2])]) == 0
    *product, last = fake.asked["space"]
    assert last == VARIANTS[2]
    assert {(v.bm, v.bn) for v in product} == {(64, 32), (64, 48)}
    words = ["explore", *Q, "--dtype", "float32", "--gpu", "h200"]
    assert cli.main([*words, "--kernel", "fa1_fp32", "--kernel", "fa2_fp32"]) == 0
    assert {v.kernel for v in fake.asked["space"]} == {"fa1_fp32", "fa2_fp32"}
    words = ["explore", *Q, "--gpu", "h200", "--kernel", "fa3_wgmma", "--space", "ping_pong=true"]
    assert cli.main(words) == 0
    assert {v.ping_pong for v in fake.asked["space"]} == {True}


def test_an_illegal_variant_is_a_row(capsys: Captured) -> None:
    pytest.importorskip("cupy")
    illegal = VARIANTS[0]._replace(stages=20)
    assert cli.main(["explore", *Q, "--arch", "sm_80", "--variant", str(illegal)]) == 1
    out, _ = capsys.readouterr()
    assert "bytes of shared memory are needed" in out


def test_a_variant_of_decode_is_a_row_that_says_so(capsys: Captured) -> None:
    pytest.importorskip("cupy")
    variant = "decode<bfloat16, 128, 128, 16, 16, 3, 4, 1, false, false, Score<>, Paged>"
    assert cli.main(["explore", *Q, "--arch", "sm_80", "--variant", variant]) == 1
    out, _ = capsys.readouterr()
    assert "decode is for cufa.decode" in out


def test_ctrl_c_keeps_what_was_found(fake: Fake, capsys: Captured, tmp_path: Path) -> None:
    fake.interrupted = True
    target = tmp_path / "x.json"
    assert cli.main(["explore", *Q, "--gpu", "h200", "--json", str(target)]) == 130
    out, err = capsys.readouterr()
    assert len(json.loads(target.read_text())["rows"]) == 1
    assert f"best: {VARIANTS[0]}" in out
    assert "interrupted" in err


def test_a_full_disk_does_not_cost_what_was_found(
    fake: Fake, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> str:
        raise OSError("No space left")

    monkeypatch.setattr(Exploration, "to_json", fail)
    assert cli.main(["explore", *Q, "--gpu", "h200", "--json", str(tmp_path / "x.json")]) == 1
    out, err = capsys.readouterr()
    assert f"best: {VARIANTS[1]}" in out
    assert err.endswith("error: No space left\n")


@pytest.mark.skipif(os.name == "nt", reason="needs SIGINT")
def test_sigint_for_real(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    target = tmp_path / "x.json"
    command = [sys.executable, "-m", "cufa", "explore", "--q", "2,16,1024,32", "--arch", "sm_90a"]
    command += ["--kernel", "fa2_mma", "--dtype", "bfloat16", "--jobs", "2", "--json", str(target)]
    # Jobs in the background of a shell ignore SIGINT, and so would their children.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=heeding, **pipes) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        for _ in range(3):  # an impatient user
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert first.startswith("compiled 1/")
    assert "Traceback" not in err
    found = json.loads(target.read_text())["rows"]
    assert 1 <= len(found) < int(first.split()[1].partition("/")[2])
    assert "fa2_mma" in out


def test_a_figure(fake: Fake, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "x.png"
    assert cli.main(["explore", *Q, "--gpu", "h200", "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


# -- the terminal ----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Text that claims to be a terminal."""

    def isatty(self) -> bool:
        """Claim it."""
        return True


def test_a_terminal_gets_a_live_table(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["explore", *Q, "--gpu", "h200"]) == 0
    assert "TFLOP/s" in out.getvalue()
    assert "\x1b[" in err.getvalue()
    assert "compiled 1/3" not in err.getvalue()


def test_the_live_table_shows_the_fastest_first() -> None:
    console = pytest.importorskip("rich.console")
    text = Terminal()
    live = watch.Live(console.Console(file=text, width=200, height=11, force_terminal=True))
    for done, row in enumerate(ROWS, 1):
        live(Progress("time", done, len(ROWS), row))
    console.Console(file=text, width=200).print(live._shown())
    shown = text.getvalue()
    assert "3/3" in shown
    assert shown.index("100.0") < shown.index("200.0")
    assert "300.0" not in shown  # the terminal has room for two rows


def test_a_narrow_terminal_gets_lines() -> None:
    console = pytest.importorskip("rich.console")
    text = Terminal()
    live = watch.Live(console.Console(file=text, width=80, height=30, force_terminal=True))
    live.begin_problem(4, 36, Problem.of_shapes(*[(2, 16, 1024, 64)] * 3))
    live(Progress("compile", 1, 3, known_after("compile", ROWS[0])))
    console.Console(file=text, width=80).print(live._shown())
    shown = text.getvalue()
    assert "problem 5/36: float16" in shown
    assert "100 registers" in shown
    assert "warps" not in shown


def test_without_rich_a_terminal_gets_plain_lines(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "rich"] + ["rich", "rich.console"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert table.console(Terminal()) is None
    with watch.watch() as show:
        assert isinstance(show, watch.Lines)


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_variants_are_timed(capsys: Captured, tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    words = ["explore", *Q, "--kernel", "fa2_mma"]
    for axis in ("bm=64", "bn=32,64", "stages=2"):
        words += ["--space", axis]
    assert cli.main([*words, "--json", str(target)]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(target.read_text())["rows"]
    assert all(row["correct"] for row in rows if row["error"] is None)
    assert all(row["median_us"] > 0 for row in rows if row["error"] is None)
    assert "best: fa2_mma<" in out
    assert "timed 1/" in err
