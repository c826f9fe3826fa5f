"""Tuning: what wins a class, what is stored; on measurements that the tests play, and on a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from played_stage import PlayedStage

import cufa
from cufa import device as devices
from cufa import tuned
from cufa.compiler.nvrtc import Compiled, CompileError
from cufa.explorer import build, gradients, subject, tune
from cufa.explorer.build import Built
from cufa.explorer.gradients import GradientsOf
from cufa.explorer.race import Duel
from cufa.explorer.run import Progress
from cufa.explorer.standard import standard_problems
from cufa.explorer.subject import Subject
from cufa.explorer.table import tile_text
from cufa.explorer.tune import Tuning, entry_of
from cufa.launch import backward
from cufa.planner.backward_model import explained
from cufa.planner.plan import Plan, plan_tiles
from cufa.planner.problem_class import problem_class
from cufa.planner.tuned_table import Entry
from cufa.problem.problem import Problem
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

GPU = devices.named("a100")
PROBLEM = Problem.of_shapes(*[(4, 16, 4096, 128)] * 3, dtype="bfloat16")
TINY = Problem.of_shapes(*[(1, 1, 20, 16)] * 3, dtype="bfloat16")  # what is run in its place
PLANNED = plan_tiles(PROBLEM, GPU).variant
FAST = PLANNED._replace(bm=64, bn=96)
OTHER = PLANNED._replace(bm=192, warps=12, blocks_per_sm=1)

Contestant = tuple[Variant, bytes]


class World:
    """The behaviour of the played GPU.

    Attributes
    ----------
    us : dict of Variant to float
        Microseconds of a call in the races; those of others are 500.
    ratios : dict of Variant to float
        Outcome of a duel against the planned variant.
    errors : dict of Variant to str
        Errors that launches raise.
    wrong : set of Variant
        Those that are the fastest, and give wrong results.
    fails : set of Problem
        Problems that do not fit in memory.
    compiled : list of Variant
        In order.
    """

    def __init__(self) -> None:
        self.us: dict[Variant, float] = {}
        self.ratios: dict[tuple[Problem, Variant], float] = {}
        self.errors: dict[Variant, str] = {}
        self.wrong: set[Variant] = set()
        self.fails: set[Problem] = set()
        self.compiled: list[Variant] = []
        self.interrupt_at: Problem | None = None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Return the played GPU, an A100."""
    world = World()

    class Stage(PlayedStage):
        def __init__(self, of: Subject) -> None:
            if of.problem in world.fails:
                raise MemoryError("out of memory")
            if of.problem == world.interrupt_at:
                raise KeyboardInterrupt
            super().__init__(Subject(TINY, of.device))

        def said(self, variant: Variant, cubin: bytes) -> str:
            assert cubin == str(variant).encode()
            if variant in world.wrong:
                return "wrong 0.001"
            if variant in world.errors:
                return f"error {world.errors[variant]}"
            return f"right {world.us.get(variant, 500.0) / 1e3}"

    def duel_of(subject: Subject, first: Contestant, second: Contestant) -> Duel:
        ratio = world.ratios.get((subject.problem, second[0]), 1.0)
        return Duel(0.2, 0.2 / ratio, ratio)

    def compile_all(variants: list[Variant], arch: str, jobs: int | None) -> Iterator[Built]:
        assert arch == "sm_80"
        for variant in variants:
            world.compiled.append(variant)
            compiled = Compiled(str(variant).encode(), 100, 0, 0, 0, variant.smem_bytes, 1, "")
            yield Built(variant, compiled, 0.1)

    from cupy.cuda import runtime

    monkeypatch.setattr(runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(devices, "of_id", lambda device_id: GPU)
    monkeypatch.setattr(subject, "Stage", Stage)
    monkeypatch.setattr(gradients, "GradientStage", Stage)
    monkeypatch.setattr(tune, "duel_of", duel_of)
    monkeypatch.setattr(tune, "free_memory", lambda: None)
    monkeypatch.setattr(build, "compile_all", compile_all)
    return world


def tuned_for(problems: Any, **options: Any) -> Tuning:
    found = Tuning(GPU)
    tune.tune(found, problems, **options)
    return found


def run(*problems: Problem, **options: Any) -> Tuning:
    return tuned_for(problems, **{"space": (PLANNED, FAST, OTHER), **options})


def test_a_faster_variant_wins(world: World) -> None:
    world.us = {PLANNED: 200.0, FAST: 190.0, OTHER: 210.0}
    world.ratios = {(PROBLEM, FAST): 1.04}
    found = run(PROBLEM)
    (row,) = found.rows
    assert (row.problem, row.planned, row.winner) == (PROBLEM, PLANNED, FAST)
    assert (row.planned_us, row.ratio) == (200.0, 1.04)
    assert row.winner_us == pytest.approx(200 / 1.04)
    key = problem_class(PROBLEM, GPU)
    assert found.entries() == {key: Entry("fa2_mma", TileShape(64, 96, 2, 4, 2))}
    assert tile_text(FAST) in str(found.lines())
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["winner"] == str(FAST)


@pytest.mark.parametrize("ratio", [0.97, 1.0, 1.009])
def test_a_lost_duel_keeps_the_plan(world: World, ratio: float) -> None:
    world.us = {PLANNED: 200.0, FAST: 190.0}
    world.ratios = {(PROBLEM, FAST): ratio}
    found = run(PROBLEM)
    assert [(row.winner, row.ratio) for row in found.rows] == [(PLANNED, 1.0)]
    assert found.entries() == {}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("problem", "options", "message"),
    [
        (PROBLEM, {"jobs": 0}, "^jobs must be at least 1"),
        (PROBLEM, {"progress": 3}, "^progress must be callable"),
        (PROBLEM._replace(head_dim=999), {}, "^q has shape .* not 999"),
        (PROBLEM.reading("Blocks"), {}, "^problems: block_mask cannot be tuned"),
        (PROBLEM._replace(kv="Padded"), {}, "^problems: sequences of unequal lengths"),
    ],
)
def test_errors(problem: Problem, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        run(problem, **options)


def test_the_fastest_plan_stays_without_a_duel(world: World) -> None:
    world.us = {PLANNED: 180.0, FAST: 190.0}
    world.ratios = {(PROBLEM, FAST): 9.0}
    assert run(PROBLEM).rows[0].winner == PLANNED


def test_planned_is_timed_though_it_is_not_in_the_space(world: World) -> None:
    world.us = {PLANNED: 200.0, OTHER: 150.0}
    world.ratios = {(PROBLEM, OTHER): 1.3}
    assert run(PROBLEM, space=(OTHER,)).rows[0].winner == OTHER
    assert world.compiled == [PLANNED, OTHER]


def test_each_variant_is_compiled_once(world: World) -> None:
    longer = Problem.of_shapes(*[(1, 16, 16384, 128)] * 3, dtype="bfloat16")
    steps: list[Progress] = []
    begun: list[tuple[int, int, Problem]] = []
    run(PROBLEM, longer, PROBLEM, progress=steps.append, on_problem=lambda *p: begun.append(p))
    assert world.compiled == [PLANNED, FAST, OTHER]
    assert [(step.stage, step.done, step.total) for step in steps] == [
        *(("compile", n, 3) for n in (1, 2, 3)),
        *((stage, n, 3) for _ in range(2) for stage in ("check", "time") for n in (1, 2, 3)),
    ]
    assert begun == [(0, 2, PROBLEM), (1, 2, longer)]


# several problems of a class


SIBLINGS = (PROBLEM, PROBLEM._replace(seq_q=4000, seq_kv=4000), PROBLEM._replace(dtype="float16"))


def in_the_dtype(variant: Variant, problem: Problem) -> Variant:
    return variant._replace(dtype=problem.dtype)


def siblings_world(world: World, *ratios: float) -> dict[str, Any]:
    space = [in_the_dtype(v, p) for v in (PLANNED, FAST) for p in (SIBLINGS[0], SIBLINGS[2])]
    world.us = {v: 190.0 if v.bn == FAST.bn else 200.0 for v in space}
    for problem, ratio in zip(SIBLINGS, ratios, strict=True):
        world.ratios[problem, in_the_dtype(FAST, problem)] = ratio
    return {"space": space}


def test_one_winner_for_a_class(world: World) -> None:
    options = siblings_world(world, 1.03, 0.995, 1.05)
    assert len({problem_class(p, GPU) for p in SIBLINGS}) == 1
    found = run(*SIBLINGS, **options)
    assert [row.winner for row in found.rows] == [in_the_dtype(FAST, p) for p in SIBLINGS]
    assert [row.ratio for row in found.rows] == [1.03, 0.995, 1.05]
    assert list(found.entries().values()) == [entry_of(FAST)]


def test_a_class_must_not_lose_for_any_problem(world: World) -> None:
    found = run(*SIBLINGS, **siblings_world(world, 1.2, 0.98, 1.2))
    assert [row.ratio for row in found.rows] == [1.0] * 3
    assert found.entries() == {}


# failures


def test_failures_do_not_stop_the_others(world: World) -> None:
    longer = Problem.of_shapes(*[(1, 16, 16384, 128)] * 3, dtype="bfloat16")
    world.fails = {PROBLEM}
    found = run(PROBLEM, longer)
    assert [row.problem for row in found.rows] == [longer]
    assert found.failures == {PROBLEM: "out of memory"}
    assert "out of memory" in str(found.lines())
    assert found.to_dict()["failures"][0]["why"] == "out of memory"


def test_a_plan_that_does_not_run_is_a_failure(world: World) -> None:
    world.errors = {PLANNED: "unspecified launch failure"}
    found = run(PROBLEM)
    assert found.rows == []
    assert "unspecified launch failure" in found.failures[PROBLEM]


def test_what_does_not_compile_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    good = build.compile_all

    def compile_all(variants: Any, arch: str, jobs: int | None) -> Iterator[Built]:
        for built in good(variants, arch, jobs):
            broken = CompileError(built.variant, (), "error: no")
            yield built._replace(compiled=broken) if built.variant == FAST else built

    monkeypatch.setattr(build, "compile_all", compile_all)
    world.us = {PLANNED: 200.0, FAST: 100.0, OTHER: 190.0}
    world.ratios = {(PROBLEM, OTHER): 1.05}
    assert run(PROBLEM).rows[0].winner == OTHER


def test_an_interrupt_brings_what_was_done(world: World) -> None:
    longer = Problem.of_shapes(*[(1, 16, 16384, 128)] * 3, dtype="bfloat16")
    world.interrupt_at = longer
    found = Tuning(GPU)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(found, [PROBLEM, longer], space=(PLANNED, FAST, OTHER))
    assert [row.problem for row in found.rows] == [PROBLEM]


# the user's table


def with_table(problem: Problem) -> Plan:
    return plan_tiles(problem, GPU, table=tuned.user_table(GPU))


def faster(world: World) -> Tuning:
    world.us = {PLANNED: 200.0, FAST: 190.0}
    world.ratios = {(PROBLEM, FAST): 1.04}
    return run(PROBLEM)


def test_stored_winners_are_planned(world: World) -> None:
    path = faster(world).store("cufa tune")
    assert path == tuned.user_path(GPU)
    chosen = with_table(PROBLEM)
    assert chosen.variant == FAST
    assert "user's table" in chosen.reason


def test_the_users_table_is_not_what_is_compared_with(world: World) -> None:
    faster(world).store("cufa tune")
    before = dict(os.environ)
    assert faster(world).rows[0].planned == PLANNED
    assert os.environ == before
    assert with_table(PROBLEM).variant == FAST


def test_entries_that_win_no_more_are_dropped(world: World) -> None:
    longer = Problem.of_shapes(*[(1, 16, 16384, 128)] * 3, dtype="bfloat16")
    key, other_key = (problem_class(p, GPU) for p in (PROBLEM, longer))
    entry = entry_of(FAST)
    tuned.store(GPU, {key: entry, other_key: entry}, "before")
    world.us = {PLANNED: 180.0, FAST: 190.0}
    path = run(PROBLEM).store("cufa tune")
    table = tuned.load(path)
    assert table is not None
    assert table.entries == {other_key: entry}
    assert with_table(PROBLEM).variant == PLANNED
    assert with_table(longer).variant == FAST


# gradients


def of_gradients(problem: Problem, **options: Any) -> Any:
    """Return the plan of a call, which follows the user's table."""
    options = {"deterministic": False, **options}
    return explained(problem, GPU, "qkv", table=tuned.user_table(GPU), **options)


def test_gradients_are_raced_and_planned(world: World) -> None:
    planned, wrong, fast, *others = GradientsOf(PROBLEM, GPU).variants(None, None)
    world.us = {planned: 200.0, fast: 180.0}
    world.wrong = {wrong}
    world.ratios = {(PROBLEM, fast): 1.1}
    found = tuned_for([PROBLEM], backward=True)
    (row,) = found.rows
    assert (row.planned, row.winner, row.ratio) == (planned, fast, 1.1)
    assert world.compiled == [planned, wrong, fast, *others]
    assert tile_text(fast) in str(found.lines())
    assert found.to_dict()["rows"][0]["class"]["backward"]
    forward = with_table(PROBLEM)
    found.store("cufa tune --backward")
    assert of_gradients(PROBLEM).variant == fast
    assert "user's table" in of_gradients(PROBLEM).reason
    assert of_gradients(PROBLEM, deterministic=True).variant == planned
    assert with_table(PROBLEM) == forward
    # The table does not change the plan that others are compared with.
    assert tuned_for([PROBLEM], backward=True).rows[0].planned == planned
    assert GradientsOf(PROBLEM, GPU).planned(()) == fast


def test_gradients_that_win_no_more_are_dropped(world: World) -> None:
    planned, fast, *_ = GradientsOf(PROBLEM, GPU).variants(None, None)
    key = GradientsOf(PROBLEM, GPU).key()
    tuned.store(GPU, {key: entry_of(fast), problem_class(PROBLEM, GPU): entry_of(FAST)}, "before")
    world.us = {planned: 100.0}
    tuned_for([PROBLEM], backward=True).store("cufa tune --backward")
    assert of_gradients(PROBLEM).variant == planned
    assert with_table(PROBLEM).variant == FAST


def test_a_space_of_gradients(world: World) -> None:
    planned = GradientsOf(PROBLEM, GPU).usual()
    narrow = planned._replace(bm=16, bn=32, stages=1, warps=2, blocks_per_sm=1)
    world.us = {planned: 200.0, narrow: 100.0}
    world.ratios = {(PROBLEM, narrow): 2.0}
    space = {name: (getattr(narrow, name),) for name in TileShape._fields[:5]}
    tuned_for([PROBLEM], space=space, backward=True).store("a test")
    assert world.compiled == [planned, narrow]
    assert of_gradients(PROBLEM).variant == narrow


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": (FAST,)}, "with backward it must map"),
        ({"backward": 1}, "^backward must be True or False"),
    ],
)
def test_errors_of_gradients(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tuned_for([PROBLEM], **{"backward": True, **options})


# the standard problems


def test_standard_problems() -> None:
    found = standard_problems()
    assert len(found) == len(set(found)) == 36
    for problem in found:
        assert problem.dtype == "bfloat16"
        assert problem.heads_q * problem.head_dim == 2048
        assert problem.batch * problem.seq_q == 16384
    assert len({problem_class(problem, GPU) for problem in found}) == 36
    assert len(standard_problems(("float16", "float32"), (64,), (True,), (512, 1024))) == 4


@pytest.mark.parametrize(
    ("options", "message"), [({"head_dims": (96,)}, "96"), ({"seqs": (3,)}, "3")]
)
def test_what_does_not_divide(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        standard_problems(**options)


# on a GPU


@pytest.mark.gpu
def test_on_a_gpu(cupy: Any, tmp_path: Path) -> None:
    device = devices.of_id(cupy.cuda.runtime.getDevice())
    problems = [
        Problem.of_shapes(*[(1, 4, seq, 64)] * 3, dtype=dtype, causal=True)
        for seq, dtype in ((256, "float16"), (250, "bfloat16"), (1024, "float16"))
    ]
    base = Variant("fa2_mma", "float16", 64, 64, 64, 64, 2, 4, 1, score=("Causal",))
    space = [base._replace(dtype=d, bn=n) for d in ("float16", "bfloat16") for n in (32, 64)]
    steps: list[Progress] = []
    found = Tuning(device)
    tune.tune(found, problems, space=space, progress=steps.append)
    assert found.failures == {}
    assert {row.problem for row in found.rows} == set(problems)
    for row in found.rows:
        assert min(row.planned_us, row.winner_us) > 1
        assert row.ratio == 1.0 or row.ratio > 0.99
        assert row.winner == row.planned or entry_of(row.winner) in found.entries().values()
    assert {step.stage for step in steps} == {"compile", "check", "time"}
    found.store("a test")
    for row in found.rows:
        chosen = plan_tiles(row.problem, device, table=tuned.user_table(device))
        assert chosen.variant == row.winner


@pytest.mark.gpu
def test_gradients_on_a_gpu(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.of_id(cupy.cuda.runtime.getDevice())
    problem = Problem.of_shapes(*[(1, 4, 500, 64)] * 3, dtype="float16", causal=True)
    found = Tuning(device)
    tune.tune(found, [problem], backward=True)
    assert found.failures == {}
    (row,) = found.rows
    assert min(row.planned_us, row.winner_us) > 1
    assert row.ratio == 1.0 or row.ratio > 0.99
    found.store("a test")
    q, dout = (cupy.random.standard_normal((1, 4, 500, 64)).astype("float16") for _ in range(2))
    out, lse = cufa.attention(q, q, q, causal=True, return_lse=True)
    # Each tile, be it the winner or not, gives the gradients where the table says that it won.
    results: list[Any] = []
    for variant in (row.winner, *GradientsOf(problem, device).variants(None, None)):
        if results:
            tuned.store(device, {row.problem_class: entry_of(variant)}, "a test")
        monkeypatch.setattr(backward, "_prepared", {})
        plan: Any = cufa.explain_backward(q, q, q, causal=True)
        assert plan.variant == variant
        results.append(cufa.attention_backward(dout, q, q, q, out, lse, causal=True))
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert cupy.allclose(one, other, atol=5e-3, rtol=5e-3)
