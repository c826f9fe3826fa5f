"""The tuned table's rows of gradients: which calls plan by them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from played_gpu import Gpu, on_gpu

import cufa
from cufa import device, tuned
from cufa.explorer.gradients import GradientsOf
from cufa.explorer.subject import Subject
from cufa.launch import backward
from cufa.planner.array_sums import Wanted
from cufa.planner.backward import BackwardPlan, backward_plan
from cufa.planner.backward_model import explained
from cufa.planner.plan import plan_tiles
from cufa.planner.problem_class import ProblemClass, problem_class
from cufa.planner.tuned_table import Entry, Table, dump, parse
from cufa.problem.problem import Problem
from cufa.specs.kernel_spec import TileShape

H200, A100, RTX = (device.named(name) for name in ("h200", "a100", "rtx4090"))
SHAPES = (2, 8, 4000, 64), (2, 4, 4096, 64), (2, 4, 4096, 64)
PROBLEM = Problem.of_shapes(*SHAPES, dtype="bfloat16", causal=True)
ENTRY = Entry("bwd_wgmma", TileShape(64, 128, 2, 12, 1))
SHAPE = ENTRY.shape


def class_of(problem: Problem = PROBLEM, gpu: device.Device = H200) -> ProblemClass:
    return GradientsOf(problem, gpu).key()


def table_of(entry: Entry = ENTRY, key: ProblemClass | None = None) -> Table:
    return Table("h200", "", "2026-11-21", "a test", {key or class_of(): entry})


def planned(
    problem: Problem = PROBLEM,
    table: Table | None = None,
    wrt: Collection[str] = "qkv",
    deterministic: bool = False,
    gpu: device.Device = H200,
    **options: Any,
) -> BackwardPlan:
    return explained(problem, gpu, wrt, deterministic, table=table, **options)


def test_classes() -> None:
    """As those of the forward pass, but for the direction, and the tiles, which are of keys."""
    found = class_of()
    assert found == ProblemClass(2, 64, 64, ("Causal",), 4096, 4096, 2, backward=True)
    assert not problem_class(PROBLEM, H200).backward
    same = PROBLEM._replace(dtype="float16", heads_q=32, scale=-2.0, returns_lse=True)
    assert class_of(same) == found
    assert class_of(PROBLEM.reading("Sinks")) == found  # they are in the log-sum-exp
    assert class_of(PROBLEM._replace(heads_kv=8)).waves == 4
    wide = PROBLEM._replace(head_dim=130, head_dim_v=130)
    assert class_of(wide)[1:3] == (192, 192)
    softcap = Problem.of_shapes(*SHAPES, dtype="bfloat16", softcap=5.0)
    assert class_of(softcap).score == ("FineSoftcap",)


def test_the_class_of_sequences_that_follow_each_other() -> None:
    packed = PROBLEM._replace(
        batch=1, seq_q=8000, seq_kv=8192, kv="Varlen", sequences=2, max_seqlen_q=6000
    )
    assert class_of(packed) == class_of()
    assert class_of(packed._replace(sequences=1)).seq_kv == 8192
    class_of(packed._replace(sequences=0))
    assert class_of(PROBLEM._replace(kv="Padded")) == class_of()


def test_a_plan_by_the_table() -> None:
    usual, found = planned(), planned(table=table_of())
    assert (usual.variant.bm, found.variant.bm) == (128, 64)
    assert found.variant == usual.variant._replace(**SHAPE._asdict())
    assert found.steps[1].instance == found.variant
    assert usual.reason == "default for bfloat16"
    assert found.reason == "tuned on 2026-11-21 (user's table)"
    assert found.reason in str(found)
    other = PROBLEM._replace(dtype="float16", seq_q=3000).reading("Sinks")
    assert planned(other, table_of(), (*"vqk", "sinks")).reason == found.reason
    forced = usual.variant
    assert planned(table=table_of(), forced=forced).reason == "forced variant"
    assert planned(table=table_of(), forced=forced).variant == forced


@pytest.mark.parametrize("kv", ["Varlen", "Padded"])
def test_sequences_of_other_lengths_take_the_row(kv: str) -> None:
    given = PROBLEM._replace(kv=kv)
    if kv == "Varlen":
        given = given._replace(batch=1, seq_q=8000, seq_kv=8192, sequences=2)
    found = planned(given, table_of())
    assert found.variant.bm == 64
    assert found.variant.kv == kv


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"deterministic": True}),
        ({}, {"wrt": ("k", "v")}),
        ({"features": ()}, {}),
        ({"seq_kv": 2000}, {}),
        ({"head_dim": 65}, {}),
        ({"dtype": "float32"}, {}),
    ],
    ids=str,
)
def test_calls_that_were_not_raced_follow_the_rules(changes: Any, options: Any) -> None:
    problem = PROBLEM._replace(**changes)
    assert planned(problem, table_of(), **options) == planned(problem, **options)


def test_gradients_of_a_bias_follow_the_rules() -> None:
    """Another kernel computes them; the row is for the other gradients where a bias is given."""
    problem = PROBLEM.reading("BiasFloat32")
    wanted = [Wanted("BiasFloat32", "float32", (2, 8, 4000, 4096))]
    table = table_of(key=class_of(problem))
    assert planned(problem, table).reason == table.reason
    for entry in (ENTRY, Entry("bwd_mma", TileShape(64, 64, 2, 4, 1))):
        table = table_of(entry, class_of(problem))
        options: Any = {"wrt": (*"qkv", "bias"), "wanted": wanted}
        assert planned(problem, table, **options) == planned(problem, **options)


def test_a_row_of_the_other_direction_is_not_taken() -> None:
    forward = Entry("fa2_mma", TileShape(64, 32, 2, 4, 1))
    key = problem_class(PROBLEM, H200)
    assert planned(table=table_of(forward, key)) == planned()
    assert planned(table=table_of(ENTRY, key)) == planned()
    assert plan_tiles(PROBLEM, H200, table=table_of()) == plan_tiles(PROBLEM, H200)
    both = table_of()._replace(entries={key: forward, class_of(): ENTRY})
    assert parse(dump(both)) == both
    assert plan_tiles(PROBLEM, H200, table=both).variant.bm == 64
    assert planned(table=both).variant.bm == 64


def test_arrays_without_tensor_maps_take_another_kernel() -> None:
    problem = PROBLEM._replace(returns_lse=True)
    plans = (
        backward_plan(problem, H200, "qkv", deterministic=False, maps=False, table=table)
        for table in (table_of(), None)
    )
    found, usual = plans
    assert found == usual
    assert found.variant.kernel == "bwd_mma"


@pytest.mark.parametrize(
    ("gpu", "d", "entry"),
    [
        (H200, 64, ENTRY._replace(shape=TileShape(256, 256, 2, 12, 1))),
        (H200, 64, ENTRY._replace(shape=TileShape(63, 128, 2, 12, 1))),
        (H200, 64, ENTRY._replace(shape=TileShape(0, 0, 0, 0, 0))),
        (H200, 64, ENTRY._replace(shape=SHAPE._replace(warps=8))),
        (H200, 64, ENTRY._replace(kernel="bwd_mma")),
        (H200, 64, ENTRY._replace(kernel="fa9")),
        (H200, 256, Entry("bwd_dq_wgmma", TileShape(64, 64, 3, 12, 1))),  # not of the one size
        (H200, 256, Entry("bwd_dkv_wgmma", TileShape(128, 64, 2, 12, 1))),  # the second kernel
        (RTX, 128, Entry("bwd_mma", TileShape(32, 64, 2, 4, 2))),  # of an A100's shared memory
        (A100, 64, ENTRY),
        (A100, 64, Entry("bwd_mma", TileShape(64, 80, 1, 4, 1))),  # 20 keys a warp
        (A100, 64, Entry("bwd_mma", TileShape(32, 64, 1, 8, 1))),  # 8 keys a warp
        (A100, 64, Entry("bwd_mma", TileShape(32, 64, 3, 4, 1))),
        (A100, 64, Entry("bwd_mma", TileShape(16, 1024, 1, 64, 1))),
    ],
    ids=str,
)
def test_rows_that_are_not_legal_are_passed_over(gpu: device.Device, d: int, entry: Entry) -> None:
    problem = PROBLEM._replace(head_dim=d, head_dim_v=d)
    table = table_of(entry, class_of(problem, gpu))
    assert planned(problem, table, gpu=gpu) == planned(problem, gpu=gpu)


def test_a_row_of_two_kernels_is_for_the_first() -> None:
    wide = PROBLEM._replace(head_dim=192, head_dim_v=192)
    entry = Entry("bwd_dq_wgmma", TileShape(128, 64, 3, 12, 1))
    usual, found = (planned(wide, t) for t in (None, table_of(entry, class_of(wide))))
    assert (usual.variant.stages, found.variant.stages) == (4, 3)
    assert usual.steps[2] == found.steps[2]


def test_older_tables_hold_rows_of_the_forward_pass() -> None:
    entry = Entry("fa2_mma", TileShape(64, 32, 2, 4, 3))
    table = table_of(entry, problem_class(PROBLEM, H200))
    older = dump(table).replace(', "backward": false', "")
    assert older != dump(table)
    assert parse(older) == table
    with pytest.raises(ValueError, match="backward is 1"):
        parse(dump(table).replace('"backward": false', '"backward": 1'))


def test_subjects_know_what_a_table_holds() -> None:
    for subject in (Subject(PROBLEM, A100), GradientsOf(PROBLEM, A100)):
        for variant in subject.variants(None, None)[:5]:
            shape = TileShape._make(getattr(variant, name) for name in TileShape._fields)
            assert subject.variant_of(Entry(variant.kernel, shape)) == variant


@pytest.mark.parametrize("deterministic", [False, True])
def test_calls_run_what_the_table_says(
    gpu: Gpu, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "_prepared", {})
    problem = Problem.of_shapes(*[(1, 2, 300, 64)] * 3, dtype="float16")
    tuned.store(H200, {class_of(problem): ENTRY}, "a test")
    q, dout = (on_gpu(np.zeros((1, 2, 300, 64), np.float16)) for _ in range(2))
    lse = on_gpu(np.zeros((1, 2, 300), np.float32))
    options: Any = {"deterministic": deterministic}
    cufa.attention_backward(dout, q, q, q, q, lse, **options)
    plan: Any = cufa.explain_backward(q, q, q, **options)
    assert plan.variant.bm == (128 if deterministic else 64)
    assert ("user's table" in plan.reason) != deterministic
    assert gpu.launches == [step.instance for step in plan.steps]
    gpu.launches.clear()
    ends = on_gpu(np.array([0, 300], np.int32))
    rows = [on_gpu(x.host[0].swapaxes(0, 1).copy()) for x in (dout, q)]
    packed = rows[0], rows[1], rows[1], rows[1], rows[1], on_gpu(lse.host[0])
    cufa.attention_varlen_backward(*packed, ends, ends, **options)
    products = next(each for each in gpu.launches if each.kernel == plan.variant.kernel)
    assert (products.kv, products.bm) == ("Varlen", plan.variant.bm)
