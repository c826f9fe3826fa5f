"""planner/attention.py: which calls of `attention` run as those of `decode` do."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_plan import devices
from test_problem import problems

from cufa import device
from cufa.features import parse
from cufa.features.causal import Causal
from cufa.features.window import Window
from cufa.planner import attention, decode
from cufa.planner import plan as tiled
from cufa.planner.attention import decode_variants
from cufa.planner.decode import DecodePlan
from cufa.planner.plan import Plan
from cufa.planner.problem_class import problem_class
from cufa.planner.rules import KEY_STEP
from cufa.planner.tuned_table import Entry, Table
from cufa.problem.problem import Problem
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

H200 = device.named("h200")
TUNED = Entry("fa3_wgmma", TileShape(64, 64, 2, 8, 2))


def problem(
    b: int, hq: int, hk: int, sq: int, sk: int, d: int = 128, dtype: str = "bfloat16", dv: int = 0
) -> Problem:
    shapes = (b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv or d)
    return Problem.of_shapes(*shapes, dtype=dtype, causal=sq > 1)


def planned(
    given: Problem, gpu: device.Device, kernel: str | None = None, **options: Any
) -> Plan | DecodePlan:
    """Return the plan of a planner that has planned nothing else."""
    return attention.Planner(given, gpu, kernel, **options)(given)


def decodes(given: Problem, gpu: device.Device = H200) -> bool:
    return isinstance(planned(given, gpu), DecodePlan)


# Where both were measured on an H200, the faster one: us as `decode`, and by fa3_wgmma.
@pytest.mark.parametrize(
    ("sizes", "as_decode"),
    [
        ((1, 32, 8, 1, 1024), True),  # 4.0, 12.2
        ((1, 32, 8, 1, 131072), True),  # 126, 1086
        ((4, 32, 8, 16, 8192), True),  # 39, 71
        ((4, 32, 8, 32, 2048), False),  # 28, 22
        ((16, 32, 8, 5, 8192), True),  # 122, 134
        ((16, 32, 8, 16, 8192), True),  # 125, 135
        ((16, 32, 8, 32, 8192), False),  # 273, 137
        ((32, 32, 8, 4, 2048), True),  # 63, 69
        ((64, 32, 8, 16, 2048), False),  # 156, 136
        ((8, 64, 8, 4, 8192, 64), True),  # 35, 53
        ((40, 64, 8, 8, 1024, 64), False),  # 38, 26
        ((8, 16, 8, 32, 4096, 256), False),  # 88, 69
    ],
)
def test_what_was_measured(sizes: Any, as_decode: bool) -> None:
    assert decodes(problem(*sizes)) == as_decode


def test_many_queries_and_full_grids_are_not_for_decode() -> None:
    assert not decodes(problem(1, 32, 8, 512, 8192))
    assert not decodes(problem(1, 8, 8, 8192, 8192))
    assert not decodes(problem(64, 32, 32, 128, 2048))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["a100", "rtx3090", "rtx4090", "h200", "b200"])
def test_one_query_beside_many_keys_is_for_decode_everywhere(name: str, dtype: str) -> None:
    gpu = device.named(name)
    for hq, hk, d in ((32, 8, 128), (28, 4, 64), (8, 8, 80), (71, 1, 64)):
        assert decodes(problem(1, hq, hk, 1, 30_000, d, dtype), gpu)


def test_the_plan_is_that_of_decode() -> None:
    given = problem(2, 28, 4, 3, 9000, 80)
    found, expected = planned(given, H200), decode.plan_splits(given.in_cache, H200)
    assert isinstance(found, DecodePlan)
    assert found == expected._replace(reason=found.reason)
    assert str(found).startswith("decode<bfloat16, 96, 96, ")
    assert f" grid={found.grid} " in str(found)
    assert str(found).endswith("(few queries: as for cufa.decode)")


@pytest.mark.parametrize("kernel", ["fa3_wgmma", "fa2_mma"])
def test_a_kernel_that_is_forced_is_taken(kernel: str) -> None:
    given = problem(1, 32, 8, 1, 8192)
    assert planned(given, H200, kernel) == tiled.plan_tiles(given, H200, kernel)
    with pytest.raises(ValueError, match=r"which is for cufa\.decode"):
        planned(given, H200, "decode")


def test_a_tuned_table_is_about_the_other_kernels() -> None:
    for sq, own in ((1, False), (99, True)):
        call = problem(1, 32, 8, sq, 8192)
        entries = {problem_class(call, H200): TUNED}
        table = Table("h200", "", "a day", "a test", entries)
        found = planned(call, H200, table=table)
        assert ("tuned on a day" in found.reason) == own


@functools.cache
def known_variants(gpu: device.Device, causal: bool) -> frozenset[Variant]:
    return frozenset(decode_variants(gpu, [causal]))


@settings(deadline=None)  # the first of a GPU finds what it knows
@given(problems(st.integers(0, 1 << 17)), devices)
def test_any_problem(given: Problem, gpu: device.Device) -> None:
    """Nothing but calls without a result or keys are empty."""
    found = planned(given, gpu)
    if isinstance(found, Plan):
        assert found == tiled.plan_tiles(given, gpu)
    else:
        assert found.grid > 0
        assert found.variant.illegal(gpu) is None
        assert found.variant in known_variants(gpu, given.causal)


KINDS: dict[str, Callable[[Problem], Problem]] = {
    "plain": lambda p: p,
    "causal": lambda p: p.having(Causal()),
    "top-left": lambda p: p.having(*parse({"causal": "top-left"})),
    "left": lambda p: p.having(Window(300, None)),
    "right": lambda p: p.having(Window(None, 40)),
    "window": lambda p: p.having(Window(200, 100)),
    "chunk": lambda p: p.having(*parse({"attention_chunk": 100})),
    "bias": lambda p: p.having(Causal()).reading("BiasFloat16"),
    "tiles left out": lambda p: p.reading("Blocks"),
    "lengths": lambda p: p.having(Causal())._replace(kv="Padded"),
    "sequences": lambda p: p._replace(kv="Varlen"),
    "float32": lambda p: p._replace(dtype="float32"),
}


@pytest.mark.parametrize("name", ["h200", "a100"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_planned_before_changes_no_plan(kind: str, name: str) -> None:
    """Hundreds of calls, many of which the planner takes for those of other lengths."""
    gpu, rng = device.named(name), random.Random(kind)
    base = KINDS[kind](problem(1, 8, 8, 1, 1, 64))
    for alone in (False, True):
        planner = attention.Planner(base, gpu, batch_invariant=alone)
        for longest in (300, 700, 700, 40_000) * 25:
            given = base.sized(
                *rng.choice(((1, 8, 8), (1, 8, 8), (2, 8, 2), (3, 71, 1), (40, 6, 2))),
                *(rng.randint(1, longest), rng.randint(1, longest)),
            )
            if base.kv == "Varlen":
                given = given._replace(batch=1, sequences=given.batch)
            assert planner(given) == planned(given, gpu, batch_invariant=alone), given


@given(problems(st.integers(1, 1 << 15)), devices, st.integers(1, 300))
def test_batch_invariant(given: Problem, gpu: device.Device, batch: int) -> None:
    """Bits depend on the same choices as those of a batch of one."""
    planner = attention.Planner(given, gpu, batch_invariant=True)
    one, many = (planner(given._replace(batch=b)) for b in (1, batch))
    assert planner.fallback is None
    assert many == planned(given._replace(batch=batch), gpu, batch_invariant=True)
    assert one.variant == many.variant
    if isinstance(one, Plan):
        assert isinstance(many, Plan)
        assert one.pack == many.pack
        assert many.reason.endswith("; batch_invariant: as for a batch of one")
    else:
        assert isinstance(many, DecodePlan)
        assert one.splits == many.splits > 0
        assert one.row_tiles == many.row_tiles


def test_batch_invariant_says_where_the_variant_comes_from() -> None:
    call = problem(8, 32, 8, 99, 8192)
    table = Table(
        "h200", "", "a day", "a test", {problem_class(call._replace(batch=1), H200): TUNED}
    )
    found = attention.Planner(call, H200, table=table, batch_invariant=True).explained(call)
    assert "tuned on a day" in found.reason
    assert not found.expected_us
    with pytest.raises(ValueError, match=r"^k: .* without batch_invariant another kernel runs"):
        planned(problem(8192, 64, 8, 1, 1 << 20), H200, batch_invariant=True)


def test_expected_times() -> None:
    def explained(call: Problem, gpu: device.Device) -> Plan | DecodePlan:
        return attention.Planner(call, gpu).explained(call)

    found = explained(problem(1, 32, 8, 1024, 1024), H200)
    assert found.expected_us[0][0] == found.variant
    times = [us for _, us in found.expected_us]
    assert len(times) > 2
    assert times == sorted(times)
    assert 15 < times[0] < 25
    found = explained(problem(16, 32, 8, 5, 8192), H200)
    assert [variant.kernel for variant, _ in found.expected_us] == ["decode", "fa3_wgmma"]
    assert not explained(problem(1, 32, 8, 1024, 1024), device.named("a100")).expected_us
    assert not explained(problem(0, 32, 8, 1024, 1024), H200).expected_us


@example(problem(1, 4, 2, 1, 127, 64), H200)
@given(problems(st.integers(1, 1 << 15)), devices)
def test_plans_are_the_same_up_to_a_multiple_of_the_step(
    given: Problem, gpu: device.Device
) -> None:
    """A cache that grows is planned again only beyond, where there is no mask."""
    given = given.without(Causal)
    last = -(-given.seq_kv // KEY_STEP) * KEY_STEP
    first = last - KEY_STEP + 1
    plans = {planned(given._replace(seq_kv=n), gpu) for n in (first, given.seq_kv, last)}
    assert len(plans) == 1


def test_variants_that_can_be_taken() -> None:
    found = decode_variants(H200)
    assert len(found) == len(set(found))
    for dtype, causal in itertools.product(("float16", "bfloat16", "float32"), (False, True)):
        assert {v.bm for v in found if v.dtype == dtype and v.causal == causal} == (
            {16} if dtype == "float32" else {16, 32, 64}
        )
    assert not decodes(problem(1, 32, 8, 1, 8192, 128, dv=32))
    assert all(not v.causal for v in decode_variants(H200, [False]))


def test_no_queries_where_a_table_has_a_kernel_that_takes_whole_heads() -> None:
    empty = problem(1, 8, 8, 0, 4096, dtype="float32")
    entry = Entry("fa1_fp32", TileShape(64, 64, 1, 8, 1))
    table = Table("h200", "", "2026-01-01", "", {problem_class(empty, H200): entry})
    assert planned(empty, H200, table=table).variant.kernel == "fa1_fp32"
