"""planner/backward.py: which kernels compute gradients, with which tiles and how much memory."""

from __future__ import annotations

from typing import Any

import pytest
from exhaustive import exhaustive

from cufa import device
from cufa.compiler import nvrtc
from cufa.planner.array_sums import Wanted
from cufa.planner.backward import BackwardPlan, backward_plan
from cufa.problem.problem import Problem
from cufa.specs import BACKWARD_KERNELS

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
TILES = [
    (name, arch, dims)
    for name, spec in BACKWARD_KERNELS.items()
    for arch in ARCHS
    for dims in spec.tiles(device.of_arch(arch).compute_capability)
]
#: Bytes a thread may spill, loads and stores together, from the head dim on at which dK and dV fill
#: the registers; and with the parts of many features at once.
MOST_SPILLED = {"bwd_mma": (192, 16), "bwd_fp32": (128, 96)}
MOST_SPILLED_WITH_ALL = 128

tiles = pytest.mark.parametrize(("kernel", "arch", "dims"), TILES, ids=str)


def planned(kernel: str, arch: str, dims: tuple[int, int], **options: Any) -> BackwardPlan:
    """Return the plan of a problem with 4 query heads of 2 groups, 300 queries and 500 keys."""
    d, dv = dims
    problem = Problem.of_shapes(
        *((2, 4, 300, d), (2, 2, 500, d), (2, 2, 500, dv)),
        dtype=BACKWARD_KERNELS[kernel].dtypes[-1],
        **options,
    )
    return backward_plan(problem, device.of_arch(arch), "qkv", True)


@tiles
def test_planned_tiles_fit(kernel: str, arch: str, dims: tuple[int, int]) -> None:
    gpu = device.of_arch(arch)
    for options in ({}, {"softcap": 3.0}):
        plan = planned(kernel, arch, dims, **options)
        v, instance = plan.variant, plan.steps[1].instance
        assert (v.kernel, v.head_dim, v.head_dim_v) == (kernel, *dims)
        assert instance.smem_bytes <= gpu.smem_per_block
        assert (instance.smem_bytes + 1024) * v.blocks_per_sm <= gpu.smem_per_sm
        assert v.threads * v.blocks_per_sm <= gpu.threads_per_sm


@tiles
@exhaustive("backward", but=lambda kernel, arch, dims: (arch, dims) == ("sm_80", (128, 128)))
def test_planned_tiles_keep_to_registers(kernel: str, arch: str, dims: tuple[int, int]) -> None:
    wide, spilled = MOST_SPILLED[kernel]
    several = {"causal": True, "softcap": 3.0, "dropout_p": 0.5}
    for options in ({}, {"causal": True}, several):
        plan = planned(kernel, arch, dims, **options)
        instance = plan.steps[1].instance
        compiled = nvrtc.compile_variant(instance, arch)
        few = spilled if dims[0] >= wide else 0
        most = MOST_SPILLED_WITH_ALL if options is several else few
        assert compiled.spill_bytes <= most, instance
        assert "warning" not in compiled.log.lower(), compiled.log


def test_steps_and_memory() -> None:
    plan = planned("bwd_mma", "sm_80", (128, 128))
    names = [step.instance.kernel for step in plan.steps]
    assert names == ["bwd_prepare", "bwd_mma", "bwd_finish"]
    rows = 2 * 4 * 320  # whole units of 64
    assert plan.workspace_rows == 320
    assert [step.grid for step in plan.steps] == [40, 2 * 2 * 8, 40]
    assert (plan.row_lse, plan.row_delta, plan.dq_sums) == (0, rows, 2 * rows)
    assert plan.turns == rows * (2 + 128)
    # A turn for 16 rows, and how many blocks have begun.
    assert plan.workspace_words == rows * (2 + 128) + rows // 16 + 4


def test_what_is_not_wanted_takes_no_memory() -> None:
    problem = Problem.of_shapes((1, 4, 64, 64), (1, 2, 64, 64), (1, 2, 64, 64), dtype="bfloat16")
    plan = backward_plan(problem, device.named("h200"), "k", True)
    assert [step.instance.kernel for step in plan.steps] == ["bwd_prepare", "bwd_mma"]
    assert (plan.dq_sums, plan.turns, plan.workspace_words) == (-1, -1, 2 * 4 * 64)


LENGTHS = (2, 4, 300, 500)
KEY_TILES = 8


@pytest.mark.parametrize(
    ("lengths", "dtype", "words", "chains"),
    [
        # Each number is one block's
        ((2, 4, 300, 500), "float32", 0, 0),
        ((2, 4, 300, 500), "bfloat16", 2 * 4 * 300 * 500, 0),
        # Sequences, heads or both share them, tile by tile of the keys
        ((1, 4, 300, 500), "float32", 0, 2 * KEY_TILES),
        ((2, 1, 300, 500), "float16", 2 * 300 * 500, 2 * KEY_TILES),
        ((1, 1, 300, 500), "float32", 0, KEY_TILES),
        # Sums of each sequence and head
        ((1, 4, 1, 500), "float32", 2 * 4 * 500, 0),
        ((2, 4, 300, 1), "float32", 0, 2 * 2),
        ((1, 1, 1, 1), "bfloat16", 2 * 4 * 300, 2 * 2),
    ],
)
def test_sums_of_a_bias(lengths: tuple[int, ...], dtype: str, words: int, chains: int) -> None:
    """Memory grows with the bias, or with the lengths of sequences, and not with their product."""
    problem = Problem.of_shapes(
        *((2, 4, 300, 64), (2, 2, 500, 64), (2, 2, 500, 64)), dtype="float32"
    )
    part = f"Bias{dtype.capitalize()}"
    wanted = [Wanted(part, dtype, lengths)]
    for deterministic in (False, True):
        plan = backward_plan(
            problem.reading(part), device.named("h200"), ("bias",), deterministic, wanted
        )
        assert plan.key_tiles == KEY_TILES
        assert plan.sums[0].lengths == lengths
        ordered = chains if deterministic else 0
        assert (0 if plan.chains is None else plan.chains.chains) == ordered
        first, end = plan.cleared
        assert end - first == words + ordered
        assert ("InTurn" in plan.variant.score) == (ordered > 0)
        assert (plan.turns >= 0) == (ordered > 0)
        steps = [step.instance.kernel for step in plan.steps]
        assert steps == ["bwd_prepare", "bwd_fp32"]
