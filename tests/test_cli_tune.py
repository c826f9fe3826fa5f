"""cli: `tune`, what it asks for, keeps and prints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from test_cli import fields
from test_cli_compile import Builder, builder

from cufa import cli, device, tuned
from cufa.cli import machine
from cufa.explorer import Progress, Row
from cufa.explorer.gradients import GradientsOf
from cufa.explorer.space import variants
from cufa.explorer.subject import Subject
from cufa.explorer.tune import Tuned, Tuning
from cufa.features.softcap import Softcap
from cufa.planner.plan import plan_tiles
from cufa.problem.problem import Problem

GPU = device.named("h200")
Q = ("--q", "2,16,1024,64")

__all__ = ["builder"]  # a fixture

Captured = pytest.CaptureFixture[str]


class Fake:
    """In place of `tune`: a variant with narrower tiles wins each problem, by 1.25."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.stop_after: int | None = None
        self.fail = False

    def __call__(
        self,
        tuning: Tuning,
        problems: Iterable[Problem],
        *,
        backward: bool,
        jobs: int | None,
        progress: Any,
        on_problem: Any,
    ) -> None:
        """Fill the tuning, or be interrupted."""
        self.problems = list(problems)
        subject_of = GradientsOf if backward else Subject
        for done, problem in enumerate(self.problems):
            if done == self.stop_after:
                raise KeyboardInterrupt
            on_problem(done, len(self.problems), problem)
            subject = subject_of(problem, GPU)
            planned = subject.usual()
            winner = planned._replace(bm=64) if backward else planned._replace(bn=96)
            progress(Progress("time", 1, 1, Row(winner, median_us=80.0)))
            if self.fail:
                tuning.failures[problem] = "out of memory"
                continue
            row = Tuned(problem, subject.key(), planned, 100.0, winner, 80.0, 1.25)
            tuning.rows.append(row)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    pytest.importorskip("cupy")
    found = Fake()
    monkeypatch.setattr("cufa.cli.tune.tune", found)
    monkeypatch.setattr(machine, "current_gpu", lambda remedy: GPU)
    return found


def test_the_winners_are_kept_and_used(fake: Fake, capsys: Captured, tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    assert cli.main(["tune", *Q, "--causal", "--json", str(target)]) == 0
    out, err = capsys.readouterr()
    (problem,) = fake.problems
    assert problem.causal
    assert f"wrote {tuned.user_path(GPU)}\n" in err
    assert "problem 1/1: float16, batch 2" in err
    chosen = plan_tiles(problem, GPU, table=tuned.user_table(GPU))
    assert chosen.variant.bn == 96
    assert "tuned on" in chosen.reason
    assert "x96 " in out
    assert "1 of 1 change; geometric mean of the ratios 1.250" in out
    found = json.loads(target.read_text())
    words = f"tune {' '.join(Q)} --causal --json {target}"
    assert found["command"] == f"python -m cufa {words}"
    assert found["rows"][0]["ratio"] == 1.25
    table = tuned.load(tuned.user_path(GPU))
    assert table is not None
    assert table.command == f"python -m cufa {words}"


def test_both_masks_by_default_and_several_problems(fake: Fake) -> None:
    k = ("--k", "2,4,1024,64")
    more = ("--q", "1,8,1,128", "--k", "1,2,4096,128")
    assert cli.main(["tune", *Q, *k, *more, "--dtype", "bfloat16"]) == 0
    assert [(p.heads_kv, p.seq_kv, p.causal) for p in fake.problems] == [
        (4, 1024, False),
        (4, 1024, True),
        (2, 4096, False),
        (2, 4096, True),
    ]
    assert {p.dtype for p in fake.problems} == {"bfloat16"}


def test_other_scores_are_kept_and_used(fake: Fake) -> None:
    score = ["--softcap", "50", "--array", "sinks"]
    assert cli.main(["tune", *Q, *score, "--causal"]) == 0
    (problem,) = fake.problems
    assert problem.score == ("FineSoftcap", "Causal", "Sinks")
    chosen = plan_tiles(problem.having(Softcap(30.0)), GPU, table=tuned.user_table(GPU))
    assert chosen.variant == plan_tiles(problem, GPU).variant._replace(bn=96)
    assert plan_tiles(problem.without(Softcap), GPU, table=tuned.user_table(GPU)).variant.bn != 96


def test_gradients_are_kept_beside_the_forward_pass(fake: Fake, capsys: Captured) -> None:
    words = [*Q, "--causal"]
    assert cli.main(["tune", *words]) == 0
    assert cli.main(["tune", *words, "--backward"]) == 0
    assert "bwd_wgmma 64x128 " in capsys.readouterr().out
    table = tuned.load(tuned.user_path(GPU))
    assert table is not None
    assert sorted(key.backward for key in table.entries) == [False, True]
    for how, tiles in (
        ([], {"bm": "128", "bn": "96"}),
        (["--backward"], {"bm": "64", "bn": "128"}),
        (["--backward", "--deterministic"], {"bm": "128", "bn": "128"}),
    ):
        assert cli.main(["explain", *words, *how, "--gpu", "h200"]) == 0
        out, _ = capsys.readouterr()
        found = fields(out)
        assert tiles == {name: found[name] for name in tiles}
        assert ("user's table" in out) == ("--deterministic" not in how)
    assert cli.main(["tune", *words, "--backward", "--dry-run", "--standard"]) == 2


def test_kernels_of_tuned_gradients_are_compiled(fake: Fake, builder: Builder) -> None:
    assert cli.main(["tune", *Q, "--causal", "--backward"]) == 0
    compile_them = ["compile", "--gpu", "h200", "--for", Q[1], "--dtype", "float16", "--causal"]
    assert cli.main([*compile_them, "--backward"]) == 0
    (products,) = (str(each) for each in builder.asked if each.kernel == "bwd_wgmma")
    assert products.startswith("bwd_wgmma<float16, 64, 64, 64, 128, 2, 12, 1, Score<Causal>")


def test_the_standard_table(fake: Fake) -> None:
    assert cli.main(["tune", "--standard", "--dtype", "bfloat16", "--dry-run"]) == 0
    assert len(fake.problems) == len(set(fake.problems)) == 36
    assert cli.main(["tune", "--standard", "--no-causal", "--dry-run"]) == 0
    assert len(fake.problems) == 18


def test_a_dry_run_keeps_nothing(fake: Fake, capsys: Captured) -> None:
    assert cli.main(["tune", *Q, "--dry-run"]) == 0
    assert "2 of 2 change" in capsys.readouterr().out
    assert not tuned.user_path(GPU).exists()


@pytest.mark.parametrize("done", [0, 1])
def test_ctrl_c_keeps_what_is_done(done: int, fake: Fake, capsys: Captured) -> None:
    fake.stop_after = done
    assert cli.main(["tune", *Q]) == 130
    out, err = capsys.readouterr()
    assert "interrupted" in err
    assert ("1 of 1 change" if done else "nothing was tuned") in out
    assert tuned.user_path(GPU).exists() == bool(done)


def test_a_problem_that_cannot_be_measured(fake: Fake, capsys: Captured) -> None:
    fake.fail = True
    assert cli.main(["tune", *Q, "--no-causal"]) == 1
    out, _ = capsys.readouterr()
    assert "failed: out of memory" in out
    assert not tuned.user_path(GPU).exists()


def test_a_table_that_cannot_be_written_is_refused_before_the_work(
    fake: Fake, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file"))
    assert cli.main(["tune", *Q]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m cufa tune: error: the cache folder cannot be written")
    assert fake.problems == []
    assert cli.main(["tune", *Q, "--dry-run"]) == 0


def test_a_full_disk_does_not_cost_what_was_found(
    fake: Fake, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Path:
        raise OSError("No space left")

    monkeypatch.setattr(Tuning, "store", fail)
    assert cli.main(["tune", *Q]) == 1
    out, err = capsys.readouterr()
    assert "2 of 2 change" in out
    assert err.endswith("error: No space left\n")


@pytest.mark.gpu
def test_a_small_problem_on_a_gpu(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cufa.explorer import tune as tuner

    def small(tuning: Tuning, problems: Iterable[Problem], **options: Any) -> None:
        axes = {"bm": (64,), "bn": (32, 64), "stages": (2,), "warps": (4,)}
        (problem,) = problems
        space = variants(problem, tuning.device, ["fa2_mma"], axes)
        tuner.tune(tuning, [problem], space=space, **options)

    monkeypatch.setattr("cufa.cli.tune.tune", small)
    target = tmp_path / "x.json"
    assert cli.main(["tune", *Q, "--causal", "--json", str(target)]) == 0
    out, _ = capsys.readouterr()
    assert "geometric mean" in out
    (row,) = json.loads(target.read_text())["rows"]
    assert row["planned_us"] > 0
    assert cli.main(["explain", *Q, "--causal"]) == 0
    assert row["winner"] in capsys.readouterr().out


@pytest.mark.gpu
def test_gradients_of_a_small_problem_on_a_gpu(capsys: Captured, tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    words = [*Q, "--causal"]
    assert cli.main(["tune", *words, "--backward", "--json", str(target)]) == 0
    (row,) = json.loads(target.read_text())["rows"]
    assert row["class"]["backward"]
    assert row["planned_us"] > 0
    capsys.readouterr()
    assert cli.main(["explain", *words, "--backward"]) == 0
    out, _ = capsys.readouterr()
    assert row["winner"] in out
    assert ("user's table" in out) == (row["winner"] != row["planned"])
