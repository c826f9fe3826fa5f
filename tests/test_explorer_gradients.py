"""explorer: gradients, their tiles, their oracle, and the rows of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from played_stage import CEILINGS, PlayedStage
from reference import DTYPES
from test_cli_compile import Captured

import cufa
from cufa import cli
from cufa import device as devices
from cufa.device import Device
from cufa.explorer import gradients
from cufa.explorer.gradient_oracle import GradientOracle
from cufa.explorer.gradients import GradientsOf
from cufa.explorer.inputs import Inputs
from cufa.explorer.oracle import Verdict
from cufa.explorer.result import Row
from cufa.explorer.run import Run
from cufa.planner.backward import backward_plan
from cufa.planner.backward_model import flops
from cufa.problem.problem import Problem
from cufa.specs.variant import BackwardVariant

A100 = devices.named("a100")
SHAPES = (2, 4, 70, 24), (2, 2, 90, 24), (2, 2, 90, 16)
PROBLEM = Problem.of_shapes(*[(1, 2, 300, 128)] * 3, dtype="bfloat16", causal=True)


# the oracle


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window": (20, None)},
        {"softcap": 2.0, "causal": True},
        {"dropout_p": 0.3},
        {"sinks": "h"},
        {"bias": "hqk", "alibi_slopes": "h", "causal": True},
    ],
    ids=str,
)
def test_right_is_told_from_wrong(
    rng: np.random.Generator, dtype: str, options: dict[str, Any]
) -> None:
    q, k, v, dout = (
        rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
        for shape in (*SHAPES, (*SHAPES[0][:3], SHAPES[2][3]))
    )
    sizes = dict(zip("hqk", (4, 70, 90), strict=True))
    given = {
        name: rng.standard_normal([sizes[axis] for axis in axes], np.float32)
        for name, axes in options.items()
        if isinstance(axes, str)
    }
    values: dict[str, Any] = {n: x for n, x in options.items() if n not in given}
    names = {"sinks": "Sinks", "bias": "BiasFloat32", "alibi_slopes": "Alibi"}
    problem = Problem.of_shapes(*SHAPES, dtype=dtype, **values)
    problem = problem.reading(*(names[name] for name in given))
    call = {**values, **given, **({"seed": 0} if "dropout_p" in values else {})}
    out, lse = cufa.attention(q, k, v, return_lse=True, **call)
    right = cufa.attention_backward(dout, q, k, v, out, lse, **call)
    oracle = GradientOracle(np, problem, dout, Inputs((q, k, v), arrays=given))
    assert oracle.judge(*right).complaint is None
    for i, name in enumerate("qkv"):
        wrong = [x.copy() for x in right]
        wrong[i][-1, -1, 3, 5] += DTYPES[dtype].type(0.25)
        assert f"d{name}: error" in (oracle.judge(*wrong).complaint or "")
        wrong[i][0, 1] = np.nan
        assert "finite" in (oracle.judge(*wrong).complaint or "")


# the space


def variants(problem: Problem, gpu: Device, space: Any) -> Any:
    return GradientsOf(problem, gpu).variants(None, space)


def test_tiles() -> None:
    found = variants(PROBLEM, A100, {})
    plan = backward_plan(PROBLEM._replace(returns_lse=True), A100, "qkv", deterministic=False)
    assert found[0] == plan.variant
    assert len(found) == len(set(found)) > 3
    assert {(v.kernel, v.head_dim, v.score) for v in found} == {(found[0].kernel, 128, ("Causal",))}
    assert all(v.illegal(A100) is None for v in found)
    assert str(found[0]) == str(plan.steps[1].instance)
    some = variants(PROBLEM, A100, {"bm": (16, 32), "stages": (1,)})
    assert {(v.bm, v.stages) for v in some} == {(16, 1), (32, 1)}


def test_tiles_of_two_kernels_stay_of_one_size() -> None:
    h200 = devices.named("h200")
    wide = Problem.of_shapes(*[(1, 2, 300, 192)] * 3, dtype="bfloat16")
    planned, *others = variants(wide, h200, {"stages": (3, 4)})
    assert planned.kernel == "bwd_dq_wgmma"
    assert {(v.bm, v.bn) for v in others} == {(planned.bm, planned.bn)}


def test_illegal_tiles() -> None:
    base = variants(PROBLEM, A100, {})[0]
    for changes, reason in (
        ({"bm": 999}, "bytes of shared memory are needed"),
        ({"blocks_per_sm": 9}, "blocks do not fit"),
        ({"warps": 63}, "threads"),
        ({"warps": 0}, "must be positive"),
        ({"bm": 48, "blocks_per_sm": 1}, "no such tile"),
        ({"bn": 80, "blocks_per_sm": 1}, "no such tile"),
        ({"stages": 3, "bm": 16, "blocks_per_sm": 1}, "no such tile"),
        ({"kernel": "fa9"}, "kernel must be one of"),
    ):
        variant: Any = base._replace(**changes)
        assert isinstance(variant, BackwardVariant)
        assert reason in (variant.illegal(A100) or "")


# a run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run that has measured three tiles, one of which is wrong."""

    class Stage(PlayedStage):
        def judge(self) -> Any:
            return lambda out: Verdict(0.1, "dk: error" if out[0, 0, 0, 0] > 100 else None)

        def ready(self, variant: Any, cubin: bytes) -> Any:
            word, _, rest = cubin.decode().partition(" ")

            def call() -> float:
                self.operands.out[...] = 200 if word == "wrong" else 0
                return float(rest)

            return call

    monkeypatch.setattr(gradients, "GradientStage", Stage)
    tiles = variants(PROBLEM, A100, {})[:3]
    cubins = "right 2", "wrong 1", "right 1"
    compiled: Any = {v: (Row(v), cubin.encode()) for v, cubin in zip(tiles, cubins, strict=True)}
    found = Run(None, None)
    found.compiled = compiled
    found.build(GradientsOf(PROBLEM, A100), list(tiles))
    found.measure()
    return found


def test_rows(run: Run) -> None:
    exploration = run.exploration()
    fastest, planned, wrong = exploration.rows
    assert exploration.planned == planned.variant
    assert (fastest.median_us, planned.median_us) == (1000, 2000)
    assert (wrong.correct, wrong.notes) == (False, ("dk: error",))
    assert exploration.best == fastest
    assert fastest.tflops == pytest.approx(flops(PROBLEM) / 1e9)
    assert planned.expected_us
    assert fastest.expected_us is None
    assert exploration.ceilings == CEILINGS
    assert "planned" in str(exploration)
    assert exploration.to_dict()["rows"][0]["kernel"] == fastest.variant.kernel


def test_without_a_gpu(capsys: Captured) -> None:
    pytest.importorskip("cupy")
    words = ["explore", "--q", "1,2,300,32", "--dtype", "bfloat16", "--backward", "--arch", "sm_80"]
    assert cli.main([*words, "--space", "bm=64", "--space", "bn=64", "--space", "warps=4"]) == 0
    out, _ = capsys.readouterr()
    assert "64x64" in out
    assert "planned: bwd_mma<bfloat16, 32, 32, 64, 64, 2, 4, 2, Score<>, Dense>" in out


def test_bad_arguments() -> None:
    q = np.ones((1, 2, 300, 32), np.float32)
    with pytest.raises(ValueError, match="give q as a Problem"):
        cufa.explore(q, q, q, backward=True, arch="sm_80")
    with pytest.raises(ValueError, match="one kernel of gradients"):
        cufa.explore(PROBLEM, backward=True, kernels=["fa2_mma"], arch="sm_80")
    with pytest.raises(TypeError, match="with backward it must map"):
        cufa.explore(PROBLEM, backward=True, space=[], arch="sm_80")
    with pytest.raises(TypeError, match="backward"):
        cufa.explore(PROBLEM, backward=1, arch="sm_80")  # type: ignore[arg-type]
