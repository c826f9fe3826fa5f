"""Checks and races of one problem: on a stage that the tests play, and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from played_stage import CEILINGS, PlayedStage
from reference import random_inputs

from cufa import device as devices
from cufa.arrays import as_bhsd
from cufa.compiler import nvrtc
from cufa.device import Device
from cufa.explorer import run as module
from cufa.explorer import subject
from cufa.explorer.inputs import Inputs
from cufa.explorer.race import Race
from cufa.explorer.result import Row
from cufa.explorer.run import Progress, Run
from cufa.explorer.subject import Subject, duel_of
from cufa.explorer.work import flops, memory_bound, nbytes, shortest_s
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

H200 = devices.named("h200")
PROBLEM = Problem.of_shapes(*[(1, 2, 40, 16)] * 3, dtype="float16", causal=True)
BASE = Variant("fa2_mma", "float16", 32, 32, 64, 64, 2, 4, 1, score=("Causal",))


def variant_of(bn: int) -> Variant:
    return BASE._replace(bn=bn)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[PlayedStage]:
    """Play the GPU, and return its stages as they come."""
    stages: list[PlayedStage] = []

    class Stage(PlayedStage):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            stages.append(self)

    monkeypatch.setattr(subject, "Stage", Stage)
    return stages


def compiled_run(*cubins: str, progress: Any = None) -> Run:
    """Return a run that has compiled variants of bn 16, 32, ..., and these cubins for them."""
    variants = [variant_of(16 * i) for i in range(1, len(cubins) + 1)]
    compiled = {
        v: (Row(v, registers=v.bn), cubin.encode())
        for v, cubin in zip(variants, cubins, strict=True)
    }
    run = Run(None, progress)
    run.compiled = compiled
    run.build(Subject(PROBLEM, H200), variants)
    return run


def measured(*cubins: str) -> tuple[Run, list[Row]]:
    """Return the run, and the rows of its variants in their order."""
    run = compiled_run(*cubins)
    run.measure()
    return run, [run.rows[variant_of(16 * i)] for i in range(1, len(cubins) + 1)]


@pytest.mark.usefixtures("played")
def test_right_is_told_from_wrong() -> None:
    _, (right, wrong, nothing, random) = measured("right", "wrong", "nothing", "random")
    assert (right.correct, right.error, right.notes, right.registers) == (True, None, (), 16)
    assert right.max_error is not None
    assert right.max_error < 1e-3
    for row, note in ((wrong, "exceeds"), (nothing, "finite"), (random, "different results")):
        assert (row.correct, row.error, row.median_us) == (False, None, None)
        assert note in row.notes[-1]


@pytest.mark.usefixtures("played")
def test_an_error_of_one_variant_is_its_own() -> None:
    run, (illegal, launch, right) = measured("illegal", "error too many resources", "right")
    assert illegal.error == "it is for float32"
    assert launch.error == "too many resources"
    assert (launch.correct, right.correct) == (None, True)
    assert run.lost is None


@pytest.mark.usefixtures("played")
def test_a_broken_context_ends_the_measurement() -> None:
    run, (right, address, late) = measured("right", "address", "right")
    assert address.error == "an illegal memory access was encountered"
    assert str(late.error).startswith(f"not measured: {variant_of(32)} broke the CUDA context")
    assert str(right.error).startswith("not timed: ")
    assert run.ceilings is None


def test_race_fills_in_the_times(played: list[PlayedStage]) -> None:
    run, rows = measured("right 2.0", "right 1.0", "right 9.0", "wrong 0.5")
    assert [row.median_us for row in rows[:3]] == pytest.approx([2000, 1000, 9000])
    assert rows[3].median_us is None
    assert [row.registers for row in rows] == [16, 32, 48, 64]
    assert run.ceilings == CEILINGS
    assert [each.rest_s for each in played] == [1]


@pytest.mark.usefixtures("played")
def test_steps() -> None:
    steps: list[Progress] = []
    run = compiled_run("right 2.0", "right 1.0", "wrong", progress=steps.append)
    run.measure()
    assert [(step.stage, step.done, step.total) for step in steps] == [
        *(("check", n, 3) for n in (1, 2, 3)),
        *(("time", n, 2) for n in (1, 2)),
    ]
    assert all(step.row.median_us is not None for step in steps[3:])


@pytest.mark.usefixtures("played")
def test_what_was_timed_before_an_error_is_kept() -> None:
    run, rows = measured("right", "late 1.5", "right")
    assert all(row.median_us is not None and row.error is None for row in rows)
    assert "unspecified launch failure" in str(run.lost)


@pytest.mark.usefixtures("played")
def test_an_interrupt_keeps_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(race: Race[Variant], on_done: Any) -> None:
        race.estimate()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "knock_out", interrupted)
    run = compiled_run("right 2.0", "right 1.0")
    with pytest.raises(KeyboardInterrupt):
        run.measure()
    assert [row.median_us for row in run.rows.values()] == [2000, 1000]
    assert [row.spread for row in run.rows.values()] == [None, None]


@pytest.mark.usefixtures("played")
def test_errors_of_the_caller_come_through() -> None:
    def progress(step: Progress) -> None:
        raise KeyError("the caller's")

    with pytest.raises(KeyError):
        compiled_run("right", progress=progress).measure()


def test_nothing_to_measure(played: list[PlayedStage]) -> None:
    run, _ = measured()
    assert (run.rows, played) == ({}, [])


def test_duel(played: list[PlayedStage]) -> None:
    found = duel_of(
        Subject(PROBLEM, H200), (variant_of(16), b"right 3.0"), (variant_of(32), b"right 2.0")
    )
    assert found == (3.0, 2.0, 1.5)
    assert played[0].rest_s == 0


@pytest.mark.usefixtures("played")
def test_figures_of_a_time() -> None:
    _, (row,) = measured("right 2.0")
    assert row.median_us == 2000
    assert row.spread == 0
    assert row.tflops == pytest.approx(flops(PROBLEM) / 2e-3 / 1e12)
    assert row.gbs == pytest.approx(nbytes(PROBLEM) / 2e-3 / 1e9)
    shortest = shortest_s(flops(PROBLEM), nbytes(PROBLEM), CEILINGS)
    assert shortest is not None
    assert row.ceiling_fraction == pytest.approx(shortest / 2e-3)


def test_the_ceiling_of_a_problem() -> None:
    problem = Problem.of_shapes(*[(4, 16, 4096, 128)] * 3, dtype="bfloat16")
    assert shortest_s(flops(problem), nbytes(problem), CEILINGS) == pytest.approx(
        4 * 4 * 16 * 4096**2 * 128 / 700e12
    )
    assert shortest_s(flops(problem), nbytes(problem), {"read_gbs": 4000.0}) is None
    problem = Problem.of_shapes((8, 32, 1, 128), *[(8, 8, 4096, 128)] * 2, dtype="float16")
    moved = 2 * 128 * 8 * 2 * (32 + 8 * 4096)
    assert shortest_s(flops(problem), nbytes(problem), CEILINGS) == pytest.approx(moved / 4e12)


@pytest.mark.parametrize(("seq_q", "bound"), [(1, True), (64, True), (4096, False)])
def test_memory_bound(seq_q: int, bound: bool) -> None:
    problem = Problem.of_shapes((1, 8, seq_q, 128), *[(1, 8, 4096, 128)] * 2, dtype="bfloat16")
    assert memory_bound(problem, CEILINGS) is bound
    assert memory_bound(problem, {"read_gbs": 4000.0})


# on a GPU


def gpu_of(cupy: Any) -> Device:
    return devices.of_id(cupy.cuda.runtime.getDevice())


def run_on(
    device: Device, problem: Problem, cubins: dict[Variant, bytes], inputs: Inputs | None = None
) -> Run:
    run = Run(None, None)
    run.compiled = {variant: (Row(variant), cubin) for variant, cubin in cubins.items()}
    run.build(Subject(problem, device, inputs), list(cubins))
    run.measure()
    return run


def cubins_of(device: Device, *variants: Variant) -> dict[Variant, bytes]:
    return {variant: nvrtc.compile_variant(variant, device.arch).cubin for variant in variants}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "kernel", "causal", "scale"),
    [
        ("float16", "fa2_mma", True, None),
        ("bfloat16", "fa2_mma", False, -0.2),
        ("float32", "fa2_fp32", True, None),
        ("float32", "fa1_fp32", False, None),
    ],
)
def test_on_a_gpu(cupy: Any, dtype: str, kernel: str, causal: bool, scale: float | None) -> None:
    device = gpu_of(cupy)
    shapes = (2, 4, 300, 40), (2, 2, 333, 40), (2, 2, 333, 23)
    problem = Problem.of_shapes(*shapes, dtype=dtype, causal=causal, scale=scale)
    base = Variant(kernel, dtype, 64, 64, 64, 32, 1, 4, 1, score=("Causal",) * causal)
    variants = base, base._replace(bn=64), base._replace(bm=128)
    run = run_on(device, problem, cubins_of(device, *variants))
    assert list(run.rows) == list(variants)
    for row in run.rows.values():
        assert (row.correct, row.error, row.notes) == (True, None, ())
        assert row.median_us is not None
        assert 1 < row.median_us < 1e5
        assert row.ceiling_fraction is None or row.ceiling_fraction > 0
    assert run.ceilings is not None
    assert min(run.ceilings.values()) > 0


@pytest.mark.gpu
def test_given_arrays_on_a_gpu(cupy: Any) -> None:
    device = gpu_of(cupy)
    inputs = random_inputs(np.random.default_rng(0), "bfloat16", b=2, hq=3, sq=150, d=64)
    q, k, v = (as_bhsd(cupy.asarray(x.swapaxes(1, 2).copy()), "bshd") for x in inputs)
    problem = Problem.of_shapes(q.shape, k.shape, v.shape, dtype="bfloat16")
    variant = Variant("fa2_mma", "bfloat16", 64, 64, 64, 64, 2, 4, 1)
    cubins = cubins_of(device, variant)
    row = run_on(device, problem, cubins, Inputs((q, k, v))).rows[variant]
    assert (row.correct, row.error) == (True, None)
    pair = variant, cubins[variant]
    assert min(duel_of(Subject(problem, device), pair, pair)) > 0


@pytest.mark.gpu
def test_a_cubin_of_other_tiles_is_wrong_on_a_gpu(cupy: Any) -> None:
    device = gpu_of(cupy)
    problem = Problem.of_shapes(*[(1, 2, 256, 64)] * 3, dtype="float16", causal=True)
    variant = Variant("fa2_mma", "float16", 64, 64, 64, 64, 2, 4, 1, score=("Causal",))
    (cubin,) = cubins_of(device, variant._replace(score=())).values()
    damaged = variant._replace(bn=32)
    run = run_on(device, problem, {variant: cubin, damaged: b"no cubin"})
    assert run.rows[variant].correct is False
    assert run.rows[damaged].error is not None
    assert run.lost is None
