"""explorer: from a problem or arrays to a ranked table, with and without a GPU."""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import score_mods
from played_stage import PlayedStage
from score_arrays import FEATURES, options_of

import cufa
from cufa import device
from cufa.device import Device
from cufa.explorer import Interrupted, Progress, subject
from cufa.features.causal import Causal
from cufa.features.softcap import Softcap
from cufa.planner.plan import plan_tiles
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

H200 = device.named("h200")
SHAPE = (1, 2, 100, 32)
PROBLEM = Problem.of_shapes(SHAPE, SHAPE, SHAPE, causal=True)
SPACE = {"bm": (64,), "bn": (32, 64, 96), "stages": (1,), "warps": (4,), "blocks_per_sm": (2,)}
explore = functools.partial(cufa.explore, kernels=["fa2_mma"])  # whose space that is


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime

    def fail() -> Device:
        raise runtime.CUDARuntimeError(100)

    monkeypatch.setattr(device, "current", fail)


# --- static figures, for any architecture ---


def test_small_space() -> None:
    found = explore(PROBLEM, space=SPACE, arch="sm_90a")
    assert [row.variant.bn for row in found.rows] == [32, 64, 96]
    for row in found.rows:
        assert row.error is None
        assert row.spill_bytes == 0
        assert row.dynamic_smem_bytes == row.variant.smem_bytes
        assert row.registers is not None
        assert 32 < row.registers < 255
        assert row.blocks_per_sm is not None
        assert row.blocks_per_sm >= 2
        assert row.occupancy == row.blocks_per_sm * 128 / 2048
        assert row.code_bytes is not None
        assert row.code_bytes > 1000
        assert row.compile_s is not None
        assert row.compile_s > 0
        assert (row.correct, row.median_us, row.tflops) == (None, None, None)
    assert found.best is None
    assert found.ceilings is None
    assert (found.problem, found.device, found.arch) == (PROBLEM, H200, "sm_90a")
    assert found.planned == plan_tiles(PROBLEM, H200, "fa2_mma").variant
    assert found.compiler.startswith("NVRTC ")
    assert found.seconds > 0
    assert found.date == time.strftime("%Y-%m-%d")
    assert found.rows[0].variant.kernel in str(found)
    assert "3 variants" in repr(found)


def test_named_device_and_its_limits() -> None:
    variants = [Variant("fa2_mma", "float16", 32, 32, 256, 256, 3, 8, 1, score=("Causal",))]
    (row,) = cufa.explore(PROBLEM, space=variants, device="rtx3090").rows
    assert row.error is not None
    assert "shared memory are needed, rtx3090 has" in row.error
    gpu = device.named("rtx4090")
    found = explore(PROBLEM, space={**SPACE, "bn": (32,)}, device=gpu)
    assert (found.device, found.arch) == (gpu, "sm_89")
    assert found.rows[0].error is None


def test_planned_is_of_a_kernel_that_is_explored() -> None:
    assert plan_tiles(PROBLEM, H200).variant.kernel != "fa2_mma"
    found = explore(PROBLEM, space={**SPACE, "bn": (32,)}, arch="sm_90a")
    assert found.planned == plan_tiles(PROBLEM, H200, "fa2_mma").variant
    shape = (1, 1, 64, 32)
    problem = Problem.of_shapes(shape, shape, shape, dtype="float32")
    found = cufa.explore(problem, space=[found.planned], arch="sm_90a")
    assert found.planned == plan_tiles(problem, H200).variant


@pytest.mark.parametrize("arch", ["sm_90", "90", "sm_90a"])
def test_an_architecture_is_that_of_its_gpu(arch: str) -> None:
    found = explore(PROBLEM, space={**SPACE, "bn": (32,)}, arch=arch)
    assert (found.arch, found.rows[0].error) == ("sm_90a", None)


def test_every_kind_of_failure_is_a_row() -> None:
    shape = (1, 1, 64, 32)
    problem = Problem.of_shapes(shape, shape, shape, dtype="float32")
    good = Variant("fa1_fp32", "float32", 32, 32, 32, 32, 1, 8, 1)
    variants = {
        good: None,
        good._replace(score=("Causal",)): "its score is ('Causal',), the call's ()",
        good._replace(bm=33): "bm must be a multiple of",
        good._replace(dtype="bfloat16"): "takes float32, not bfloat16",
        good._replace(head_dim=16): "its head dims",
    }
    found = cufa.explore(problem, space=list(variants), arch="sm_80")
    assert {row.variant for row in found.rows} == set(variants)
    assert found.rows[0].variant == good
    for row in found.rows:
        expected = variants[row.variant]
        if expected is None:
            assert row.error is None
        else:
            assert row.error is not None
            assert expected in row.error


def test_refused_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that our own rules let pass, but not the source's assertions."""
    monkeypatch.setattr(Variant, "illegal", lambda variant, gpu: None)
    shape = (1, 1, 64, 32)
    problem = Problem.of_shapes(shape, shape, shape, dtype="float32")
    broken = Variant("fa1_fp32", "float32", 32, 32, 64, 64, 2, 8, 1)
    (row,) = cufa.explore(problem, space=[broken], arch="sm_90a").rows
    assert row.error is not None
    assert "tiles are not prefetched" in row.error


def test_arrays_of_numpy_stand_for_their_problem() -> None:
    q, k = np.zeros((1, 100, 4, 32), np.float16), np.zeros((1, 50, 2, 32), np.float16)
    space = {**SPACE, "bn": (32,)}
    found = explore(q, k, k, causal=True, scale=2.0, layout="bshd", space=space, arch="sm_80")
    assert found.problem == Problem("float16", 1, 4, 2, 100, 50, 32, 32, 2.0, (Causal(),))


def test_a_softcap_as_exact_as_a_log_sum_exp(rng: np.random.Generator) -> None:
    """With arrays, and with a problem."""
    q = np.zeros((1, 2, 100, 32), ml_dtypes.bfloat16)
    for flag, part in ((None, "Softcap"), (True, "FineSoftcap")):
        given: dict[str, Any] = {"softcap": 5.0, "return_lse": flag}
        found = explore(q, q, q, space={**SPACE, "bn": (32,)}, arch="sm_80", **given)
        again = explore(found.problem, space={**SPACE, "bn": (32,)}, arch="sm_80")
        for row in (*found.rows, *again.rows):
            assert row.variant.score == (part,)
            assert row.error is None
        assert ("log-sum-exp" in str(found)) == bool(flag)
    with pytest.raises(TypeError, match="return_lse must be True or False"):
        explore(q, q, q, return_lse="no", arch="sm_80")  # type: ignore[arg-type]


def test_what_stands_beside_is_compiled(rng: np.random.Generator) -> None:
    q, k = np.zeros((2, 4, 100, 32), np.float16), np.zeros((2, 2, 150, 32), np.float16)
    table = rng.standard_normal(301, np.float32)

    def after(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    found = explore(
        *(q, k, k),
        softcap=5.0,
        alibi_slopes=np.ones(4, np.float32),
        bias=np.zeros((100, 150), np.float32),
        mask=np.ones(150, bool),
        sinks=np.zeros(4, np.float32),
        score_mod=lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx],
        mask_mod=after,
        block_mask=cufa.BlockMask.of(after, None, None, 100, 150),
        dropout_p=0.1,
        space={"bm": (64,), "bn": (32,), "stages": (2,), "warps": (4,), "blocks_per_sm": (2, 3)},
        arch="sm_80",
    )
    assert {row.error for row in found.rows} == {None}
    kinds = [name.partition("_")[0] for name in found.rows[0].variant.score]
    assert kinds == [
        *("FineSoftcap", "Alibi", "BiasFloat32", "Mask", "Sinks", "Blocks", "Dropout"),
        *("ScoreMod", "MaskMod"),
    ]
    assert "alibi_slopes, bias, mask, sinks, block_mask, dropout 0.1, score_mod, mask_mod" in str(
        found
    )


def test_cplusplus_is_compiled() -> None:
    q = np.zeros((1, 1, 64, 32), np.float16)
    space = {"bm": (64,), "bn": (32,), "stages": (2,), "warps": (4,)}
    found = explore(q, q, q, score_mod="2 * score", space=space, arch="sm_80")
    assert found.rows[0].error is None


def test_progress() -> None:
    steps: list[Progress] = []
    found = explore(PROBLEM, space=SPACE, arch="sm_90a", jobs=1, progress=steps.append)
    assert [(s.stage, s.done, s.total) for s in steps] == [("compile", i, 3) for i in (1, 2, 3)]
    assert {s.row for s in steps} == set(found.rows)


def test_interrupted_keeps_what_was_compiled() -> None:
    def stop(step: Progress) -> None:
        if step.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        explore(PROBLEM, space=SPACE, arch="sm_90a", jobs=1, progress=stop)
    assert isinstance(caught.value, KeyboardInterrupt)
    rows = caught.value.exploration.rows
    assert len(rows) == 2
    assert all(row.registers for row in rows)


# --- arguments ---


@pytest.mark.usefixtures("no_gpu")
def test_without_gpu_an_architecture_is_needed() -> None:
    with pytest.raises(ValueError, match="arch must be given where there is no GPU"):
        cufa.explore(PROBLEM)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"arch": "sm_90a", "device": "h100"}, ValueError, "give only one of the two"),
        ({"arch": "sm_75"}, ValueError, "arch must be one of"),
        ({"arch": ""}, ValueError, "arch must be one of"),
        ({"arch": 90}, TypeError, "^arch must be a string, not int"),
        ({"device": "v100"}, ValueError, "^device: name must be one of"),
        ({"device": 5}, TypeError, "^device must be a name or a Device, not int"),
        ({"jobs": 0}, ValueError, "^jobs must be at least 1, not 0"),
        ({"jobs": -1}, ValueError, "^jobs must be at least 1, not -1"),
        ({"jobs": "a"}, TypeError, "^jobs must be an integer or None, not str"),
        ({"jobs": True}, TypeError, "^jobs must be an integer or None, not bool"),
        ({"progress": 3}, TypeError, "^progress must be callable or None, not int"),
        ({"kernels": 3}, TypeError, "^kernels must be a sequence of names, not 3"),
        ({"kernels": "fa2_mma"}, TypeError, "^kernels must be a sequence of names, not 'fa2_mma'"),
        ({"kernels": [3]}, TypeError, "^kernels must be a sequence of names, not"),
        ({"kernels": ()}, ValueError, "^kernels has no name"),
        ({"arch": "sm_90a", "causal": True}, TypeError, "causal must not be given with"),
        ({"arch": "sm_90a", "layout": "bhsd"}, TypeError, "^layout must not be given with"),
        ({"arch": "sm_90a", "space": 3}, TypeError, "^space must map template arguments"),
        ({"arch": "sm_90a", "k": 1}, TypeError, "k must not be given with"),
        ({"arch": "sm_90a", "space": {"bk": (1,)}}, ValueError, "'bk' is none of"),
        ({"arch": "sm_90a", "kernels": ["fa2_fp32"]}, ValueError, "takes float32"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cufa.explore(PROBLEM, **arguments)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"head_dim": 999}, ValueError, r"^q has shape .*: head_dim must be 1 to 256, not 999"),
        ({"dtype": "float99"}, TypeError, "^dtype must be one of .*, not 'float99'"),
        ({"batch": -1}, ValueError, r"^q has shape \(-1, .*: sizes must be integers >= 0"),
        ({"heads_kv": 3}, ValueError, "^q has shape .*: heads 2 is no multiple of heads 3"),
        ({"features": (Causal("up"),)}, ValueError, "^causal must be True, False, .*, not 'up'"),
        ({"features": (Softcap(-1.0),)}, ValueError, "^softcap must be 1e-06 to 10000.*, not -1.0"),
        ({"scale": "1"}, TypeError, "^scale must be a real number or None, not str"),
    ],
)
def test_a_problem_made_by_hand_is_checked(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cufa.explore(PROBLEM._replace(**fields), arch="sm_90a")


@pytest.mark.parametrize("where", [{"arch": "sm_90a"}, {"device": "h100"}, {}])
def test_without_cupy(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    how = r'pip install "\.\[cuda13\]" \(or cuda12\) in a clone of cufa'
    with pytest.raises(ImportError, match=rf"^CuPy is missing \(.*\): {how}"):
        cufa.explore(PROBLEM, **where)


def test_q_must_be_a_problem_or_an_array() -> None:
    with pytest.raises(TypeError, match="q must be a NumPy or a CuPy array, not tuple"):
        cufa.explore(SHAPE, SHAPE, SHAPE, arch="sm_80")


def test_nothing_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: H200)
    empty = PROBLEM._replace(seq_q=0)
    with pytest.raises(ValueError, match="nothing to time"):
        explore(empty, space=SPACE)
    assert explore(empty, space={**SPACE, "bn": (32,)}, arch="sm_90a").rows[0].error is None


# --- with a GPU, which a fake stands for ---


class Scripted(PlayedStage):
    """Finds bn 64 wrong, does not launch bn 96, and times the others by their bn."""

    def said(self, variant: Variant, cubin: bytes) -> str:
        """Say so."""
        assert cubin.startswith(b"\x7fELF")
        said = {64: "wrong", 96: "error too many resources requested for launch"}
        return said.get(variant.bn, f"right {variant.bn / 1000}")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: H200)
    monkeypatch.setattr(subject, "Stage", Scripted)


@pytest.mark.usefixtures("fake_gpu")
def test_checked_then_timed() -> None:
    steps: list[Progress] = []
    space = {**SPACE, "bn": (32, 48, 64, 96)}
    found = explore(PROBLEM, space=space, progress=steps.append)
    stages = [(step.stage, step.done, step.total) for step in steps]
    assert stages == [
        *(("compile", i, 4) for i in (1, 2, 3, 4)),
        *(("check", i, 4) for i in (1, 2, 3, 4)),
        *(("time", i, 2) for i in (1, 2)),
    ]
    assert [row.variant.bn for row in found.rows] == [32, 48, 64, 96]
    fast, slow, wrong, failed = found.rows
    assert found.best == fast
    assert (fast.median_us, slow.median_us) == pytest.approx((32, 48))
    assert (fast.spread, fast.correct) == (0, True)
    assert (wrong.correct, wrong.median_us) == (False, None)
    assert failed.error == "too many resources requested for launch"
    assert found.ceilings is not None


@pytest.mark.usefixtures("fake_gpu")
def test_interrupted_while_timing() -> None:
    def stop(step: Progress) -> None:
        if step.stage == "time":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        explore(PROBLEM, space={**SPACE, "bn": (32, 48)}, jobs=1, progress=stop)
    rows = caught.value.exploration.rows
    assert all(row.correct and row.median_us is not None for row in rows)


# --- with a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kernel"), [("float16", "fa2_mma"), ("float32", "fa2_fp32")])
def test_on_the_gpu(cupy: Any, dtype: str, kernel: str) -> None:
    shape = (2, 4, 500, 64)
    problem = Problem.of_shapes(shape, shape, shape, dtype=dtype, causal=True)
    space = {"bm": (64, 128), "bn": (32, 64), "stages": (1,), "warps": (4,)}
    found = cufa.explore(problem, kernels=[kernel], space=space)
    assert found.device == device.of_id(cupy.cuda.runtime.getDevice())
    assert found.best is not None
    assert found.ceilings is not None
    assert {"read_gbs", "copy_gbs"} <= set(found.ceilings)
    times = []
    for row in found.rows:
        assert row.error is None, row
        assert row.correct is True, row
        assert row.median_us is not None
        assert row.median_us > 0
        assert row.tflops == pytest.approx(
            4 * 8 * 500 * 500 * 64 / 2 / row.median_us / 1e6, rel=1e-6
        )
        assert row.gbs is not None
        assert row.ceiling_fraction is not None
        assert 0 < row.ceiling_fraction < 1.5
        times.append(row.median_us)
    assert times == sorted(times)


@pytest.mark.gpu
@pytest.mark.usefixtures("cupy")
def test_own_arrays_on_the_gpu(xp: Any, rng: np.random.Generator) -> None:
    """Also strided ones, and those of NumPy, which are copied to the GPU."""
    q = xp.asarray(rng.standard_normal((1, 300, 4, 64)).astype(np.float16))
    k = xp.asarray(rng.standard_normal((1, 400, 2, 64)).astype(np.float16))
    space = {"bm": (64,), "bn": (64,), "stages": (1, 2), "warps": (4,), "blocks_per_sm": (2,)}
    found = explore(q, k, k, causal=True, layout="bshd", space=space)
    assert found.problem[:6] == ("float16", 1, 4, 2, 300, 400)
    assert [row.correct for row in found.rows] == [True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fa2_mma", "fa3_wgmma"])
@pytest.mark.parametrize("name", [*FEATURES, *score_mods.FEATURES])
def test_what_stands_beside_on_the_gpu(
    cupy: Any, rng: np.random.Generator, name: str, kernel: str
) -> None:
    sizes = b, hq, hk, sq, sk = 2, 8, 2, 130, 500
    if name in FEATURES:
        options = options_of(rng, name, sizes)
    else:
        _, options = score_mods.made(rng, name, sizes, cupy.asarray)
    shapes = (b, hq, sq, 64), (b, hk, sk, 64), (b, hk, sk, 64)
    arrays = [rng.standard_normal(shape, np.float32).astype(np.float16) for shape in shapes]
    space = {"bm": (64, 128), "bn": (64,), "stages": (2,)}
    found = explore(*arrays, **options, kernels=[kernel], space=space)
    assert found.rows
    assert {(row.correct, row.error) for row in found.rows} == {(True, None)}


@pytest.mark.gpu
def test_cplusplus_is_not_timed(cupy: Any) -> None:
    q = cupy.zeros((1, 1, 64, 32), np.float16)
    with pytest.raises(TypeError, match=r"^score_mod is C\+\+: only what a function computes"):
        explore(q, q, q, score_mod="2 * score")


@pytest.mark.gpu
@pytest.mark.usefixtures("cupy")
def test_spilling_variant_is_timed_like_others() -> None:
    shape = (1, 4, 500, 128)
    problem = Problem.of_shapes(shape, shape, shape)
    spilling = Variant("fa2_mma", "float16", 128, 128, 128, 64, 1, 4, 4)
    (row,) = cufa.explore(problem, space=[spilling]).rows
    assert row.spill_bytes is not None
    assert row.spill_bytes > 0
    assert row.correct is True
    assert row.median_us is not None
