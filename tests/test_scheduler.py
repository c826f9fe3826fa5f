"""scheduler.py: which tiles run one after the other, and which heads share one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import (
    H200,
    NAMED,
    assert_covers_every_row_once,
    assert_fits,
    problem_of,
    tiles,
    tiles_in_order,
)
from test_problem import problems

from cufa import device
from cufa.features.causal import Causal
from cufa.planner.plan import plan_tiles
from cufa.planner.rules import all_variants
from cufa.problem.problem import Problem


def test_causal_starts_with_the_longest_rows() -> None:
    problem = problem_of(seq_q=1000, seq_kv=1000)
    chosen = plan_tiles(problem, H200)._replace(section_heads=10)
    bh, q_tile = tiles_in_order(chosen, problem, np.arange(tiles(chosen, problem)))
    section = bh // 10
    assert np.all(np.diff(section) >= 0)
    for s in range(section[-1] + 1):
        assert np.all(np.diff(q_tile[section == s]) <= 0)


def test_longest_rows_of_all_heads_come_first_if_l2_holds_their_keys() -> None:
    for heads_kv, batch in ((8, 2), (32, 1), (8, 8)):
        problem = problem_of(batch=batch, heads_kv=heads_kv, seq_q=500, seq_kv=500)
        chosen = plan_tiles(problem, H200)
        kv_bytes = batch * heads_kv * 500 * (128 + 128) * 2
        assert kv_bytes <= H200.l2_bytes / 2
        assert (chosen.section_heads, chosen.late_rows) == (32 * batch // chosen.pack, 0)
    long = problem._replace(seq_q=2000, seq_kv=2000)
    assert plan_tiles(long, H200).section_heads < 32 * batch


def test_heads_are_few_if_what_passes_drives_their_keys_out_of_l2() -> None:
    problem = problem_of(batch=61, heads_q=18, heads_kv=9, seq_q=154, seq_kv=96)
    kv_bytes = 61 * 9 * 96 * (128 + 128) * 2
    assert kv_bytes <= H200.l2_bytes / 2
    assert plan_tiles(problem, H200).section_heads < 61 * 18 / 4


@pytest.mark.parametrize("seq", [3000, 8192, 40000])
@pytest.mark.parametrize("kernel", ["fa3_wgmma", "fa2_mma"])
def test_late_rows_of_all_heads_come_last(seq: int, kernel: str) -> None:
    """They are short, and fill the gaps that long ones leave at the end."""
    problem = problem_of(heads_kv=32, seq_q=seq, seq_kv=seq)
    chosen = plan_tiles(problem, H200, kernel)
    assert 0 < chosen.late_rows < chosen.q_tiles
    bh, q_tile = tiles_in_order(chosen, problem, np.arange(tiles(chosen, problem)))
    late = q_tile < chosen.late_rows
    first = int(np.argmax(late))
    assert np.all(late[first:])
    assert np.all(np.diff(q_tile[first:]) <= 0)
    section = bh[:first] // chosen.section_heads
    assert np.all(np.diff(section) >= 0)
    for s in range(section[-1] + 1):
        assert np.all(np.diff(q_tile[:first][section == s]) <= 0)
    assert plan_tiles(problem.without(Causal), H200, kernel).late_rows == 0


@pytest.mark.parametrize("kernel", ["fa3_wgmma", "fa2_mma"])
def test_no_rows_are_late_if_the_first_see_the_most_keys(kernel: str) -> None:
    problem = Problem.of_shapes(*((1, 32, 8192, 128),) * 3, dtype="bfloat16", window=(256, None))
    assert plan_tiles(problem, H200, kernel).late_rows == 0


def test_heads_of_packed_sequences_are_interleaved() -> None:
    """About as many as have a sequence's keys in half of L2; without a mask, one by one."""
    problem = problem_of(batch=1, heads_q=32, heads_kv=32, seq_q=65536, seq_kv=65536)
    for sequences, heads in ((1, 1), (8, 8), (64, 32)):
        packed = problem._replace(kv="Varlen", sequences=sequences)
        chosen = plan_tiles(packed, H200)
        assert (chosen.section_heads, chosen.late_rows) == (heads, 0)
        assert plan_tiles(packed.without(Causal), H200).section_heads == 1


def test_a_block_of_fa1_takes_a_whole_head() -> None:
    """So heads are not interleaved, whatever their lengths."""
    for seq in (1, 4096, 2**30):
        problem = problem_of(dtype="float32", seq_q=seq, seq_kv=0)
        chosen = plan_tiles(problem.having(Causal()), H200, "fa1_fp32")
        assert (chosen.section_heads, chosen.late_rows) == (1, 0)


def test_heads_that_32_bits_cannot_count_are_refused() -> None:
    """Packed, too: the kernel numbers the heads of all batches."""
    heads = {"heads_q": 64, "heads_kv": 1, "seq_q": 1, "seq_kv": 1, "causal": False}
    assert plan_tiles(problem_of(batch=2**25, **heads), H200).pack == 64
    with pytest.raises(ValueError, match=r"^q: batch 2147483648 x heads 64 x seq 1 needs"):
        plan_tiles(problem_of(batch=2**31, **heads), H200)


@pytest.mark.parametrize("kernel", ["fa3_wgmma", "fa2_mma"])
@pytest.mark.parametrize("heads", [16, 32, 40, 64])
@pytest.mark.parametrize("seq", [2048, 4096, 8192])
def test_the_last_section_is_nearly_as_large(seq: int, heads: int, kernel: str) -> None:
    """A small one would leave its long tiles alone at the end."""
    problem = problem_of(batch=1, heads_q=heads, heads_kv=heads, seq_q=seq, seq_kv=seq)
    size = plan_tiles(problem, H200, kernel).section_heads
    assert 3 * size <= 4 * ((heads - 1) % size + 1)


def test_sections_keep_their_keys_and_values_in_l2() -> None:
    """Half of it for K and V: more heads at once when they are shorter, or L2 larger."""
    long, short = problem_of(seq_kv=16384, seq_q=16384), problem_of(seq_kv=512, seq_q=512)
    for gpu in NAMED:
        chosen = plan_tiles(long, gpu, "fa2_mma")
        kv_bytes = 16384 * (128 + 128) * 2
        kv_heads = chosen.section_heads / long.group
        assert kv_heads == 1 or kv_heads * kv_bytes <= gpu.l2_bytes / 2
        assert plan_tiles(short, gpu, "fa2_mma").section_heads >= chosen.section_heads
    assert plan_tiles(short, H200, "fa2_mma").section_heads == 64
    assert plan_tiles(problem_of(causal=False), H200, "fa2_mma").section_heads == 1


@pytest.mark.parametrize("seq", [1, 100, 1000, 4096, 60000])
@pytest.mark.parametrize("batch", [1, 5, 333])
def test_sections_where_blocks_draw_their_tiles(batch: int, seq: int) -> None:
    for heads_q in (1, 3, 32, 61):
        for sm_count in (1, 14, 132):
            gpu = H200._replace(sm_count=sm_count)
            heads = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_q}
            problem = problem_of(**heads, seq_q=seq, seq_kv=seq)
            assert 1 <= plan_tiles(problem, gpu).section_heads <= batch * heads_q
            assert plan_tiles(problem.without(Causal), gpu).section_heads == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q", [1, 5, 60])
@pytest.mark.parametrize(
    ("group", "pack"),
    [
        *((group, group) for group in (1, 2, 4, 8, 16, 32, 64)),
        *((group, 1) for group in (3, 6, 7, 24, 96, 128)),
    ],
)
def test_short_queries_of_a_group_share_a_tile(
    group: int, pack: int, seq_q: int, causal: bool
) -> None:
    """Groups of a power of two, whose rows fill 64 of a tile evenly."""
    problem = problem_of(heads_q=3 * group, heads_kv=3, seq_q=seq_q, causal=causal)
    chosen = plan_tiles(problem, H200)
    assert chosen.pack == pack
    assert chosen.q_tiles == -(-seq_q * pack // chosen.variant.bm)
    assert_covers_every_row_once(chosen, problem)
    for kernel, gpu in (("fa2_mma", H200), (None, device.named("a100"))):
        assert plan_tiles(problem, gpu, kernel).pack == 1


def test_queries_that_fill_a_tile_do_not_share_it() -> None:
    variant = plan_tiles(problem_of(seq_q=16384, seq_kv=16384), H200).variant
    assert variant.bm == 192
    for seq_q in (191, 192, 193):
        chosen = plan_tiles(problem_of(heads_q=64, seq_q=seq_q), H200, variant)
        assert chosen.pack == (8 if seq_q < 192 else 1)


@given(problems(st.integers(1, 3000)), st.integers(0, 7), st.data())
def test_packed_tiles_are_fewer(problem: Problem, power: int, data: Any) -> None:
    group = 2**power
    problem = problem._replace(dtype="float16", heads_q=group * problem.heads_kv)
    variants = [v._replace(dtype="float16", score=problem.score) for v in all_variants(H200)]
    legal = [v for v in variants if v.kernel == "fa3_wgmma" and v.illegal(H200) is None]
    variant = data.draw(st.sampled_from(legal))
    problem = problem._replace(
        head_dim=min(problem.head_dim, variant.head_dim),
        head_dim_v=min(problem.head_dim_v, variant.head_dim_v),
    )
    chosen = plan_tiles(problem, H200, variant)
    assert_covers_every_row_once(chosen, problem)
    assert_fits(chosen, problem, H200)
    unpacked = problem.batch * problem.heads_q * -(-problem.seq_q // variant.bm)
    assert tiles(chosen, problem) <= unpacked
