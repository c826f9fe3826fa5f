"""Checks and races of one problem: on a stage that the tests play, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from reference import oracle, random_inputs

from cufa import device as devices
from cufa.arrays import Operands, as_bhsd
from cufa.compiler import nvrtc
from cufa.device import Device
from cufa.explorer import measure
from cufa.explorer.measure import Measurement, memory_bound, timed
from cufa.explorer.race import Race, Time
from cufa.explorer.result import Row
from cufa.problem import Problem
from cufa.variant import Variant

H200 = devices.named("h200")
PROBLEM = Problem.of_shapes(*[(1, 2, 40, 16)] * 3, dtype="float16", causal=True)
BASE = Variant("fa2_mma", "float16", 32, 32, 64, 64, 2, 4, 1, score=("Causal",))
CEILINGS = {"read_gbs": 4000.0, "copy_gbs": 4000.0, "gemm_tflops": 700.0}


def variant_of(bn: int) -> Variant:
    return BASE._replace(bn=bn)


class FakeStage:
    """A GPU on which what a variant does is decided by its cubin: a word, and milliseconds."""

    xp = np
    errors = (RuntimeError, MemoryError)
    broken = False

    def __init__(self, problem: Problem, operands: Operands | None, device: Device) -> None:
        inputs = random_inputs(np.random.default_rng(3), "float16", hq=2, sq=40, d=16)
        self.operands = Operands(*inputs, np.empty((1, 2, 40, 16), np.float16))
        self.right = oracle(*inputs, causal=True)[0].astype(np.float16)
        self.every_call: bool | None = None
        self.rest_s: float | None = None
        self.runs = 0

    def ready(self, variant: Variant, cubin: bytes) -> Callable[[], float]:
        """Return a call that does what the cubin says."""
        word, _, number = cubin.decode().partition(" ")
        out = self.operands.out

        def call() -> float:
            self.runs += 1
            if self.broken:
                raise RuntimeError("an illegal memory access was encountered")
            if word == "illegal":
                raise ValueError("it is for float32")
            if word == "launch":
                raise RuntimeError("too many resources requested for launch")
            if word == "address":
                type(self).broken = True
            elif word == "late" and self.runs > 12:
                raise RuntimeError("unspecified launch failure")
            elif word == "random":
                out[...] = self.right
                out[0, 0, 39, 0] += self.runs % 2 * 1e-3
            elif word != "nothing":
                out[...] = self.right + (1 if word == "wrong" else 0)
            return float(number or 1)

        return call

    def poison(self) -> None:
        """Fill the result with NaN."""
        self.operands.out.fill(np.nan)

    def wait(self) -> None:
        """Raise what a broken context raises."""
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered\nmore")

    def ceilings(self) -> dict[str, float]:
        """Return ceilings."""
        return dict(CEILINGS)

    def clock(self, every_call: bool, rest_s: float = 1) -> Any:
        """Return a clock that believes what calls return."""
        self.every_call, self.rest_s = every_call, rest_s

        def burst(call: Callable[[], float], calls: int) -> Callable[[], float]:
            ms = call()
            return lambda: ms

        return SimpleNamespace(burst=burst, rest=lambda: None)


@pytest.fixture
def measurement(monkeypatch: pytest.MonkeyPatch) -> Measurement:
    monkeypatch.setattr(measure, "Stage", FakeStage)
    monkeypatch.setattr(FakeStage, "broken", False)
    return Measurement(PROBLEM, None, H200)


def checked(measurement: Measurement, *cubins: str) -> list[Row]:
    return [
        measurement.check(Row(variant_of(16 * i), registers=i), cubin.encode())
        for i, cubin in enumerate(cubins, 1)
    ]


def test_check_tells_right_from_wrong(measurement: Measurement) -> None:
    right, wrong, nothing, random = checked(measurement, "right", "wrong", "nothing", "random")
    assert (right.correct, right.error, right.notes, right.registers) == (True, None, (), 1)
    assert right.max_error is not None
    assert right.max_error < 1e-3
    for row, note in ((wrong, "exceeds"), (nothing, "finite"), (random, "different results")):
        assert (row.correct, row.error) == (False, None)
        assert note in row.notes[-1]


def test_an_error_of_one_variant_is_its_own(measurement: Measurement) -> None:
    illegal, launch, right = checked(measurement, "illegal", "launch", "right")
    assert illegal.error == "it is for float32"
    assert launch.error == "too many resources requested for launch"
    assert (launch.correct, right.correct) == (None, True)
    assert measurement.lost is None


def test_a_broken_context_ends_the_measurement(measurement: Measurement) -> None:
    right, address, late = checked(measurement, "right", "address", "right")
    assert address.error == "an illegal memory access was encountered"
    assert str(late.error).startswith(f"not measured: {variant_of(32)} broke the CUDA context")
    rows = measurement.race([right], lambda row: None)
    assert str(rows[0].error).startswith("not timed: ")
    assert measurement.ceilings is None


def test_race_fills_in_the_times(measurement: Measurement) -> None:
    rows = checked(measurement, "right 2.0", "right 1.0", "right 9.0")
    seen: list[Row] = []
    raced = measurement.race(rows, seen.append)
    assert raced == measurement.rows
    assert [row.variant for row in raced] == [row.variant for row in rows]
    assert [row.median_us for row in raced] == pytest.approx([2000, 1000, 9000])
    assert sorted(seen) == sorted(raced)
    assert raced[0].registers == 1
    assert measurement.ceilings == CEILINGS
    assert measurement._stage.every_call is True  # type: ignore[attr-defined]


def test_what_was_timed_before_an_error_is_kept(measurement: Measurement) -> None:
    rows = checked(measurement, "right", "late 1.5", "right")
    raced = measurement.race(rows, lambda row: None)
    assert all(row.median_us is not None and row.error is None for row in raced)
    assert "unspecified launch failure" in str(measurement.lost)


def test_an_interrupt_keeps_the_rows(
    measurement: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = checked(measurement, "right 2.0", "right 1.0")
    assert measurement.rows == []

    def interrupted(race: Race[Variant], on_done: Any) -> None:
        race.estimate()
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "knock_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measurement.race(rows, lambda row: None)
    assert [row.median_us for row in measurement.rows] == [2000, 1000]
    assert [row.spread for row in measurement.rows] == [None, None]


def test_errors_of_the_caller_come_through(measurement: Measurement) -> None:
    rows = checked(measurement, "right")

    def on_row(row: Row) -> None:
        raise KeyError("the caller's")

    with pytest.raises(KeyError):
        measurement.race(rows, on_row)


def test_nothing_to_race(measurement: Measurement) -> None:
    assert measurement.race([], lambda row: None) == []


def test_duel(measurement: Measurement) -> None:
    found = measurement.duel((variant_of(16), b"right 3.0"), (variant_of(32), b"right 2.0"))
    assert found == (3.0, 2.0, 1.5)
    assert measurement._stage.rest_s == 0  # type: ignore[attr-defined]


def test_figures_of_a_time() -> None:
    problem = Problem.of_shapes(*[(4, 16, 4096, 128)] * 3, dtype="bfloat16")
    flops = 4 * 4 * 16 * 4096**2 * 128
    row = timed(Row(BASE), Time(2.0, 0.01), problem, CEILINGS)
    assert row.median_us == 2000
    assert row.spread == 0.01
    assert row.tflops == pytest.approx(flops / 2e-3 / 1e12)
    assert row.gbs == pytest.approx(4 * 2 * 4 * 16 * 4096 * 128 / 2e-3 / 1e9)
    assert row.ceiling_fraction == pytest.approx(flops / 700e12 / 2e-3)
    without = {"read_gbs": 4000.0, "copy_gbs": 4000.0}
    assert timed(Row(BASE), Time(2.0, None), problem, without).ceiling_fraction is None


def test_fraction_of_a_memory_bound_problem() -> None:
    problem = Problem.of_shapes((8, 32, 1, 128), *[(8, 8, 4096, 128)] * 2, dtype="float16")
    nbytes = 2 * 128 * 8 * 2 * (32 + 8 * 4096)
    row = timed(Row(BASE), Time(0.1, 0.0), problem, CEILINGS)
    assert row.ceiling_fraction == pytest.approx(nbytes / 4e12 / 1e-4)


@pytest.mark.parametrize(("seq_q", "bound"), [(1, True), (64, True), (4096, False)])
def test_memory_bound(seq_q: int, bound: bool) -> None:
    problem = Problem.of_shapes((1, 8, seq_q, 128), *[(1, 8, 4096, 128)] * 2, dtype="bfloat16")
    assert memory_bound(problem, CEILINGS) is bound
    assert memory_bound(problem, {"read_gbs": 4000.0})


# on a GPU


def compiled(variants: list[Variant], device: Device) -> list[tuple[Row, bytes]]:
    return [(Row(v), nvrtc.compile_variant(v, device.arch).cubin) for v in variants]


def gpu_of(cupy: Any) -> Device:
    return devices.of_id(cupy.cuda.runtime.getDevice())


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
    variants = [base, base._replace(bn=64), base._replace(bm=128)]
    measurement = Measurement(problem, None, device)
    rows = [measurement.check(row, cubin) for row, cubin in compiled(variants, device)]
    assert [(row.correct, row.error, row.notes) for row in rows] == [(True, None, ())] * 3
    seen: list[Row] = []
    for row in measurement.race(rows, seen.append):
        assert row.error is None
        assert row.median_us is not None
        assert 1 < row.median_us < 1e5
        assert row.ceiling_fraction is None or row.ceiling_fraction > 0
    assert len(seen) == 3
    assert measurement.ceilings is not None
    assert min(measurement.ceilings.values()) > 0


@pytest.mark.gpu
def test_given_arrays_on_a_gpu(cupy: Any) -> None:
    device = gpu_of(cupy)
    inputs = random_inputs(np.random.default_rng(0), "bfloat16", b=2, hq=3, sq=150, d=64)
    q, k, v = (as_bhsd(cupy.asarray(x.swapaxes(1, 2).copy()), "bshd") for x in inputs)
    problem = Problem.of_shapes(q.shape, k.shape, v.shape, dtype="bfloat16")
    variant = Variant("fa2_mma", "bfloat16", 64, 64, 64, 64, 2, 4, 1)
    measurement = Measurement(problem, Operands(q, k, v, None), device)
    ((row, cubin),) = compiled([variant], device)
    row = measurement.check(row, cubin)
    assert (row.correct, row.error) == (True, None)
    found = measurement.duel((variant, cubin), (variant, cubin))
    assert min(found) > 0


@pytest.mark.gpu
def test_a_cubin_of_other_tiles_is_wrong_on_a_gpu(cupy: Any) -> None:
    device = gpu_of(cupy)
    problem = Problem.of_shapes(*[(1, 2, 256, 64)] * 3, dtype="float16", causal=True)
    variant = Variant("fa2_mma", "float16", 64, 64, 64, 64, 2, 4, 1, score=("Causal",))
    ((_, cubin),) = compiled([variant._replace(score=())], device)
    measurement = Measurement(problem, None, device)
    assert measurement.check(Row(variant), cubin).correct is False
    assert measurement.check(Row(variant), b"no cubin").error is not None
    other = variant._replace(dtype="bfloat16")
    assert "bfloat16" in str(measurement.check(Row(other), cubin).error)
    assert measurement.lost is None
