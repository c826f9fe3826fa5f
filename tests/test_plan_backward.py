"""planner/backward.py: which kernels compute gradients, with which tiles and how much memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exhaustive import exhaustive

from cufa import device
from cufa.compiler import nvrtc
from cufa.planner.array_sums import Wanted
from cufa.planner.backward import BackwardPlan, backward_plan
from cufa.problem.problem import Problem
from cufa.specs import BACKWARD_KERNELS
from cufa.specs.instance import Instance
from cufa.specs.variant import BackwardVariant

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
TILES = [
    (name, arch, dims)
    for name, spec in BACKWARD_KERNELS.items()
    for arch in ARCHS
    if spec.runs_on(device.of_arch(arch))
    for dims in spec.head_dims(device.of_arch(arch))
]
#: Bytes a thread may spill, loads and stores together, from the head dim on at which dK and dV fill
#: the registers; and with the parts of many features at once. In bwd_wgmma it is the producer that
#: spills: it has 24 registers, and waits most of the time.
MOST_SPILLED = {"bwd_mma": (192, 36), "bwd_fp32": (128, 96), "bwd_wgmma": (64, 52)}
MOST_SPILLED_WITH_ALL = {"bwd_wgmma": 176}
SEVERAL: dict[str, Any] = {"causal": True, "softcap": 3.0, "dropout_p": 0.5}

tiles = pytest.mark.parametrize(("kernel", "arch", "dims"), TILES, ids=str)


def planned(kernel: str, arch: str, dims: tuple[int, int], **options: Any) -> BackwardPlan:
    """Return the plan of a problem with 4 query heads of 2 groups, 300 queries and 500 keys."""
    (d, dv), spec = dims, BACKWARD_KERNELS[kernel]
    problem = Problem.of_shapes(
        *((2, 4, 300, d), (2, 2, 500, d), (2, 2, 500, dv)), dtype=spec.dtypes[-1], **options
    )
    return backward_plan(problem, device.of_arch(arch), "qkv", True, maps=spec.tma)


def instance_of(plan: BackwardPlan, kernel: str) -> Instance | BackwardVariant:
    """Return a plan's instance of a kernel."""
    (found,) = (x.instance for x in plan.steps if x.instance.kernel == kernel)
    return found


def takes(kernel: str, options: Any) -> bool:
    return BACKWARD_KERNELS[kernel].differentiates or not {"softcap", "dropout_p"} & set(options)


@tiles
def test_planned_tiles_fit(kernel: str, arch: str, dims: tuple[int, int]) -> None:
    gpu = device.of_arch(arch)
    for options in ({}, {"causal": True}, {"softcap": 3.0}):
        if not takes(kernel, options):
            continue
        plan = planned(kernel, arch, dims, **options)
        v, instance = plan.variant, instance_of(plan, kernel)
        assert (v.head_dim, v.head_dim_v) == dims
        assert instance.smem_bytes <= gpu.smem_per_block
        assert (instance.smem_bytes + 1024) * v.blocks_per_sm <= gpu.smem_per_sm
        assert v.threads * v.blocks_per_sm <= gpu.threads_per_sm


@tiles
def test_tiles_of_specs_are_legal(kernel: str, arch: str, dims: tuple[int, int]) -> None:
    gpu, spec = device.of_arch(arch), BACKWARD_KERNELS[kernel]
    for shape in spec.tiles(gpu, dims):
        variant = BackwardVariant(kernel, spec.dtypes[-1], *dims, **shape._asdict())
        assert variant.illegal(gpu) is None


@tiles
@pytest.mark.parametrize("options", [{}, {"causal": True}, SEVERAL], ids=str)
@exhaustive(
    "backward",
    but=lambda kernel, arch, dims: (
        (arch, dims) == ("sm_80", (128, 128)) or (kernel, dims) == ("bwd_wgmma", (128, 128))
    ),
    one_in=3,
)
def test_planned_tiles_keep_to_registers(
    kernel: str, arch: str, dims: tuple[int, int], options: dict[str, Any]
) -> None:
    if not takes(kernel, options):
        pytest.skip("its kernel takes neither a softcap nor dropout")
    wide, spilled = MOST_SPILLED.get(kernel, (0, 0))
    instance = instance_of(planned(kernel, arch, dims, **options), kernel)
    compiled = nvrtc.compile_variant(instance, device.of_arch(arch).arch)
    few = spilled if dims[0] >= wide else 0
    most = MOST_SPILLED_WITH_ALL.get(kernel, 128) if options is SEVERAL else few
    assert compiled.spill_bytes <= most, instance
    assert "warning" not in compiled.log.lower(), compiled.log
    assert "serialized" not in compiled.log, compiled.log


def test_steps_and_memory() -> None:
    plan = planned("bwd_mma", "sm_80", (128, 128))
    names = [step.instance.kernel for step in plan.steps]
    assert names == ["bwd_prepare", "bwd_mma", "bwd_finish"]
    rows = 2 * 4 * 384  # whole units of 128
    assert plan.workspace_rows == 384
    assert [step.grid for step in plan.steps] == [24, 2 * 2 * 8, 24]
    assert (plan.row_lse, plan.row_delta, plan.dq_sums) == (0, rows, 2 * rows)
    assert plan.turns == rows * (2 + 128)
    # A turn for 16 rows, and how many blocks have begun.
    assert plan.drawn == plan.turns + rows // 16
    assert plan.workspace_words == plan.drawn + 4


def test_wide_heads_on_hopper() -> None:
    """DQ by rows needs no sums: a step for it, and one for dK and dV."""
    plan = planned("bwd_dq_wgmma", "sm_90", (256, 256))
    names = [step.instance.kernel for step in plan.steps]
    assert names == ["bwd_prepare", "bwd_dq_wgmma", "bwd_dkv_wgmma"]
    assert [step.grid for step in plan.steps] == [24, 24, 2 * 2 * 8]
    assert (plan.dq_sums, plan.turns, plan.workspace_words) == (-1, -1, 2 * 2 * 4 * 384)


@pytest.mark.parametrize(
    ("gpu", "d", "options", "maps", "kernel"),
    [
        ("h200", 20, {}, True, "bwd_wgmma"),
        ("h200", 128, {"softcap": 3.0, "dropout_p": 0.5}, True, "bwd_wgmma"),
        ("h200", 128, {}, False, "bwd_mma"),
        ("h200", 136, {"causal": True}, True, "bwd_dq_wgmma"),
        ("h200", 256, {"softcap": 3.0}, True, "bwd_mma"),
        ("h200", 256, {"dropout_p": 0.5}, True, "bwd_mma"),
        ("a100", 64, {}, True, "bwd_mma"),
        ("b200", 64, {}, True, "bwd_mma"),
    ],
)
def test_which_kernel(gpu: str, d: int, options: Any, maps: bool, kernel: str) -> None:
    shapes = (1, 4, 64, d), (1, 2, 64, d), (1, 2, 64, d)
    problem = Problem.of_shapes(*shapes, dtype="bfloat16", **options)
    plan = backward_plan(problem, device.named(gpu), "qkv", False, maps)
    assert plan.variant.kernel == kernel


def test_what_is_not_wanted_takes_no_memory() -> None:
    problem = Problem.of_shapes((1, 2, 64, 64), (1, 2, 64, 64), (1, 2, 64, 64), dtype="bfloat16")
    plan = backward_plan(problem, device.named("h200"), "k", True)
    assert [step.instance.kernel for step in plan.steps] == ["bwd_prepare", "bwd_wgmma"]
    rows = 2 * 128
    assert (plan.dq_sums, plan.turns, plan.drawn) == (-1, -1, 2 * rows)
    assert plan.workspace_words == 2 * rows + 4


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("packed", [False, True])
def test_memory_is_bounded(arch: str, dtype: str, packed: bool) -> None:
    """By dQ and two numbers a row, in units of 128; turns; and parts of dK and dV of 64 MiB."""
    rng = np.random.default_rng(5)
    for _ in range(60):
        hk, group, b = (int(rng.choice([1, 2, 3, 7, 16])) for _ in range(3))
        sq, sk, d, dv = (int(n) for n in rng.integers(1, (9000, 9000, 257, 257)))
        shapes = (b, hk * group, sq, d), (b, hk, sk, d), (b, hk, sk, dv)
        problem = Problem.of_shapes(*shapes, dtype=dtype, causal=bool(rng.random() < 0.5))
        sequences = b
        if packed:
            sequences = int(rng.integers(1, 300))
            one = problem._replace(batch=1, kv="Varlen", sequences=sequences)
            problem = one._replace(max_seqlen_q=sq, max_seqlen_k=sk)
        plan = backward_plan(problem, device.of_arch(arch), "qkv", bool(rng.random() < 0.5))
        units = sq // 128 + sequences if packed else b * -(-sq // 128)
        rows = hk * group * units * 128
        assert plan.variant.head_dim >= d
        of_rows = rows * (2 + plan.variant.head_dim) + rows // 16 + 16
        parts = 64 << 20 >> 2 if plan.kv_splits > 1 else 0
        assert plan.workspace_words <= of_rows + parts, shapes


@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "n", "options", "splits"),
    [
        (64, 8, 2048, {"causal": True}, 2),
        (28, 4, 3000, {"causal": True}, 3),
        (64, 8, 2048, {}, 1),
        (32, 8, 512, {"causal": True}, 4),
        (16, 16, 512, {"causal": True}, 1),
        (64, 8, 16384, {"causal": True}, 1),
        (64, 8, 2048, {"window": (500, 0)}, 1),
    ],
)
def test_few_heads_of_keys_share_their_query_heads(
    heads_q: int, heads_kv: int, n: int, options: Any, splits: int
) -> None:
    """Each part of dK and dV is left in memory, and a step adds these up."""
    shapes = (1, heads_q, n, 128), (1, heads_kv, n, 128), (1, heads_kv, n, 128)
    problem = Problem.of_shapes(*shapes, dtype="bfloat16", **options)
    plan = backward_plan(problem, device.named("h200"), "qkv", False)
    tiles = heads_kv * -(-n // 128)
    assert plan.kv_splits == splits
    assert plan.steps[1].grid == min(tiles * splits, 132)  # blocks draw one part after the other
    names = [step.instance.kernel for step in plan.steps]
    join = ["bwd_join"] * (splits > 1)
    assert names == ["bwd_prepare", "bwd_wgmma", *join, "bwd_finish"]
    rows = heads_q * plan.workspace_rows
    parts = tiles * splits * 128 * 256 if splits > 1 else 0
    assert plan.workspace_words == rows * (2 + 128) + parts + 4
    assert parts <= 64 << 20 >> 2


@pytest.mark.parametrize(
    ("shape", "heads_kv", "options", "heads"),
    [
        ((1, 64, 2048, 128), 8, {"causal": True}, 8),  # all of them
        ((1, 64, 4096, 128), 8, {"causal": True}, 4),
        ((1, 64, 32768, 128), 8, {"causal": True}, 1),
        ((4, 16, 4096, 128), 16, {"causal": True}, 4),
        ((2, 16, 8192, 128), 16, {"causal": True}, 2),
        ((2, 16, 8192, 256), 16, {"causal": True}, 2),  # in tiles of 64 keys
        ((32, 16, 512, 128), 16, {"causal": True}, 1),  # few tiles a head
        ((2, 16, 8192, 128), 16, {"causal": True, "window": (1000, 0)}, 1),
        ((2, 16, 8192, 128), 16, {}, 1),
    ],
)
def test_uneven_tiles_of_some_heads_are_interleaved(
    shape: tuple[int, ...], heads_kv: int, options: Any, heads: int
) -> None:
    """A tile a multiprocessor: short ones fill the gaps that long ones leave."""
    of_keys = (shape[0], heads_kv, *shape[2:])
    problem = Problem.of_shapes(shape, of_keys, of_keys, dtype="bfloat16", **options)
    h200 = device.named("h200")
    assert backward_plan(problem, h200, "qkv", False).section_heads == heads
    if shape[3] <= 128:  # by turns a head's tiles follow each other
        assert backward_plan(problem, h200, "qkv", True).section_heads == 1


@pytest.mark.parametrize(("sequences", "heads"), [(16, 16), (2, 2), (1, 1), (64, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_packed_sequences_are_interleaved(
    sequences: int, heads: int, causal: bool
) -> None:
    """As those of as many sequences of the mean length; they differ even without a mask."""
    shape = (1, 16, 16384, 128)
    problem = Problem.of_shapes(shape, shape, shape, dtype="bfloat16", causal=causal)
    problem = problem._replace(kv="Varlen", sequences=sequences)
    h200 = device.named("h200")
    assert backward_plan(problem, h200, "qkv", False).section_heads == heads
    assert backward_plan(problem, h200, "qkv", True).section_heads == 1


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
            *(problem.reading(part), device.named("h200"), ("bias",), deterministic),
            wanted=wanted,
        )
        assert plan.key_tiles == KEY_TILES
        assert plan.arrays.sums[0].lengths == lengths
        ordered = chains if deterministic else 0
        assert (plan.arrays.chains >= 0) == (ordered > 0)
        assert plan.arrays.end - plan.arrays.start == words + ordered
        assert ("InTurn" in plan.variant.score) == (ordered > 0)
        assert (plan.turns >= 0) == (ordered > 0)
        steps = [step.instance.kernel for step in plan.steps]
        assert steps == ["bwd_prepare", "bwd_fp32"]
