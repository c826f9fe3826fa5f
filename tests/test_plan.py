"""plan.py: every output row is computed exactly once, within the limits of any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_problem import problems

import cufa
from cufa import device
from cufa.api.options import Layout
from cufa.cpu import attention as cpu
from cufa.device import Device
from cufa.features.causal import Causal
from cufa.planner.plan import Plan, plan_tiles
from cufa.planner.problem_class import problem_class
from cufa.planner.rules import KEY_STEP, all_variants
from cufa.planner.tuned_table import Entry, Table
from cufa.problem.problem import Problem
from cufa.specs import ATTENTION_KERNELS
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

KIB = 1 << 10
NAMED = [
    device.named(name) for name in ("a100", "rtx3090", "rtx4090", "h100", "h200", "b200", "rtx5090")
]
H200 = device.named("h200")
NO_SM90A = H200._replace(compiles_sm90a=False)
MAX_GRID = 2**31 - 1
MAX_THREADS = 1024


#: Compute capabilities of today, and the shared memory in KiB that a block may have there.
SMEM_KIB = {
    **dict.fromkeys((80, 87), 163),
    **dict.fromkeys((86, 89, 120, 121), 99),
    **dict.fromkeys((90, 100, 103, 110), 227),
}


@st.composite
def plausible_devices(draw: st.DrawFn) -> Device:
    """Draw a GPU that does not exist, or a slice of one that does."""
    capability = draw(st.sampled_from(sorted(SMEM_KIB)))
    smem_per_block = KIB * (SMEM_KIB[capability] + draw(st.integers(0, 100)))
    return Device(
        name="any",
        compute_capability=capability,
        sm_count=draw(st.integers(1, 300)),
        smem_per_block=smem_per_block,
        smem_per_sm=smem_per_block + KIB * draw(st.integers(1, 64)),
        l2_bytes=draw(st.integers(0, 1 << 28)),
        threads_per_sm=draw(st.sampled_from([1536, 2048])),
        registers_per_sm=65536,
        max_blocks_per_sm=draw(st.sampled_from([16, 24, 32])),
        compiles_sm90a=draw(st.booleans()),
    )


devices = st.one_of(st.sampled_from(NAMED), plausible_devices())


@st.composite
def kernel_names(draw: st.DrawFn, problem: Problem, gpu: Device) -> str | None:
    """Draw None, or a kernel for elements of this type that the GPU has."""
    fitting = [
        name
        for name, kernel in ATTENTION_KERNELS.items()
        if problem.dtype in kernel.dtypes and kernel.runs_on(gpu)
        if problem.seq_kv > 0 or not kernel.needs_keys
    ]
    return draw(st.sampled_from([None, *fitting]))


@st.composite
def planned(
    draw: st.DrawFn, length: st.SearchStrategy[int]
) -> tuple[Problem, Device, str | None, Plan]:
    """Draw any legal problem and device, a kernel or None, and the plan for them."""
    problem, gpu = draw(problems(length)), draw(devices)
    kernel = draw(kernel_names(problem, gpu))
    return problem, gpu, kernel, plan_tiles(problem, gpu, kernel)


def tiles(chosen: Plan, problem: Problem) -> int:
    """Tiles of a plan; heads whose rows are packed count as one."""
    return problem.batch * problem.heads_q // chosen.pack * chosen.q_tiles


def tiles_in_order(chosen: Plan, problem: Problem, i: np.ndarray) -> tuple[Any, Any]:
    """Return the head, of all batches, and the row tile of the i-th tiles, as scheduler.cuh."""
    heads = problem.batch * problem.heads_q // chosen.pack
    early_rows = chosen.q_tiles - chosen.late_rows
    late = i >= heads * early_rows
    rows = np.where(late, chosen.late_rows, early_rows)
    heads_at_once = np.where(late, heads, chosen.section_heads)
    i = np.where(late, i - heads * early_rows, i)
    first_head = i // (heads_at_once * rows) * heads_at_once
    section_heads = np.minimum(heads_at_once, heads - first_head)
    within = i % (heads_at_once * rows)
    row = within // section_heads
    bh = first_head + within - row * section_heads
    last = np.where(late, chosen.late_rows, chosen.q_tiles) - 1
    return bh, last - row if problem.causal else row


def assert_covers_every_row_once(chosen: Plan, problem: Problem) -> None:
    heads = problem.batch * problem.heads_q
    if chosen.variant.kernel == "fa1_fp32":  # one block a head, which loops over the rows
        assert chosen.grid == heads
        return
    assert heads % chosen.pack == 0
    heads //= chosen.pack
    rows = problem.seq_q * chosen.pack
    assert chosen.q_tiles * chosen.variant.bm >= rows
    assert chosen.q_tiles == 0 or (chosen.q_tiles - 1) * chosen.variant.bm < rows
    count = heads * chosen.q_tiles
    if chosen.variant.kernel == "fa3_wgmma":  # a block takes several, none has nothing to do
        assert chosen.grid <= count
        assert chosen.grid > 0 or count == 0
    else:
        assert chosen.grid == count
    if count == 0:
        return
    bh, q_tile = tiles_in_order(chosen, problem, np.arange(count))
    assert bh.min() >= 0
    assert bh.max() < heads
    assert q_tile.min() >= 0
    assert q_tile.max() < chosen.q_tiles
    times = np.bincount(bh * chosen.q_tiles + q_tile, minlength=count)
    assert np.all(times == 1)


def assert_fits(chosen: Plan, problem: Problem, gpu: Device) -> None:
    variant = chosen.variant
    if variant.kernel == "fa3_wgmma":
        # All blocks run at once, and the number after the last tile is one of 32 bits, too.
        assert chosen.grid <= gpu.sm_count * variant.blocks_per_sm
        assert tiles(chosen, problem) + chosen.grid <= MAX_GRID
        assert problem.seq_kv > 0
    assert variant.illegal(gpu) is None
    assert variant.dtype == problem.dtype
    assert variant.score == problem.score
    assert variant.causal == problem.causal
    assert variant.head_dim >= problem.head_dim
    assert variant.head_dim_v >= problem.head_dim_v
    assert 0 <= chosen.grid <= MAX_GRID
    assert 0 < chosen.block == variant.threads <= MAX_THREADS
    assert chosen.block * variant.blocks_per_sm <= gpu.threads_per_sm
    assert 0 < chosen.smem_bytes == variant.smem_bytes <= gpu.smem_per_block
    assert chosen.section_heads >= 1
    assert 0 <= chosen.late_rows <= chosen.q_tiles * problem.causal
    # The kernels compute these in 32 bits.
    assert chosen.section_heads * chosen.q_tiles <= MAX_GRID
    assert chosen.q_tiles * variant.bm <= MAX_GRID
    assert problem.seq_kv + variant.bn <= MAX_GRID
    rows = problem.batch * problem.heads_q * problem.seq_q
    assert chosen.workspace_floats == (2 * rows if variant.kernel == "fa1_fp32" else 0)


@given(planned(st.one_of(st.integers(0, 5), st.integers(6, 3000))))
def test_every_row_is_computed_once(case: tuple[Problem, Device, str | None, Plan]) -> None:
    problem, gpu, _, chosen = case
    assert_covers_every_row_once(chosen, problem)
    assert_fits(chosen, problem, gpu)


@given(problems(st.integers(1, 2000)), st.integers(1, 300))
def test_sections_may_be_of_any_size(problem: Problem, section_heads: int) -> None:
    """Also where they do not divide the heads."""
    chosen = plan_tiles(problem, H200)._replace(section_heads=section_heads)
    assert_covers_every_row_once(chosen, problem)


@given(problems(st.integers(0, 2**33)), devices, st.data())
def test_long_problems_fit_or_are_refused(problem: Problem, gpu: Device, data: Any) -> None:
    kernel = data.draw(kernel_names(problem, gpu))
    try:
        chosen = plan_tiles(problem, gpu, kernel)
    except ValueError as error:
        name = str(error).split()[0].rstrip(":")
        rows = max(1, problem.batch * problem.heads_q) * problem.seq_q
        assert {"q": rows, "k": problem.seq_kv}[name] > 2**31 - 257
    else:
        assert_fits(chosen, problem, gpu)


@given(planned(st.integers(64, 9000)), st.integers(64, 9000), st.data())
def test_a_decoding_loop_uses_few_kernels(
    case: tuple[Problem, Device, str | None, Plan], seq_kv: int, data: Any
) -> None:
    """Tiles have as many rows whatever K and V grow to; and the scale is no part of a kernel.

    Up to 32 keys, at some head dims, an own variant is expected to be faster.
    """
    problem, gpu, kernel, _ = case
    assume(problem.batch * problem.heads_q > 0)
    assume(problem.group <= 64)
    problem = problem._replace(seq_q=data.draw(st.integers(1, 64 // problem.group)))
    chosen = plan_tiles(problem, gpu, kernel)
    assert plan_tiles(problem._replace(scale=0.125), gpu, kernel) == chosen
    assert plan_tiles(problem._replace(seq_kv=seq_kv), gpu, kernel).variant.bm == chosen.variant.bm


@given(planned(st.integers(1, 9000)))
def test_keys_count_in_steps_where_there_is_no_mask(
    case: tuple[Problem, Device, str | None, Plan],
) -> None:
    """So a cache that grows is planned for once in a while, whatever plans."""
    problem, gpu, kernel, chosen = case
    assume(not problem.causal)
    rounded = problem._replace(seq_kv=-(-problem.seq_kv // KEY_STEP) * KEY_STEP)
    assert plan_tiles(rounded, gpu, kernel) == chosen
    assert problem_class(rounded, gpu) == problem_class(problem, gpu)


@given(planned(st.integers(1, 9000)), st.integers(1, 9000), st.integers(1, 9000))
def test_a_kernel_is_not_compiled_for_each_length(
    case: tuple[Problem, Device, str | None, Plan], seq_q: int, seq_kv: int
) -> None:
    """All lengths share a few, other ones where there is a mask."""
    problem, gpu, kernel, chosen = case
    other = plan_tiles(problem._replace(seq_q=seq_q, seq_kv=seq_kv), gpu, kernel).variant
    v = chosen.variant
    shapes = ATTENTION_KERNELS[v.kernel].tiles(gpu, (v.head_dim, v.head_dim_v))
    assert len(shapes) <= 2 * 18
    assert other in [v._replace(**shape._asdict()) for shape in shapes]


@given(planned(st.integers(1, 5000)))
def test_what_is_chosen_can_be_forced(case: tuple[Problem, Device, str | None, Plan]) -> None:
    problem, gpu, _, chosen = case
    assert chosen.variant in all_variants(gpu) or gpu.name == "any"
    forced = plan_tiles(problem, gpu, chosen.variant)
    assert forced._replace(reason="") == chosen._replace(reason="")
    assert "forced" in forced.reason
    again = plan_tiles(problem, gpu, chosen.variant.kernel)
    assert again.variant == chosen.variant
    assert "forced" in again.reason


@pytest.mark.parametrize("gpu", NAMED, ids=lambda gpu: gpu.name)
def test_all_variants_are_those_of_the_tables(gpu: Device) -> None:
    variants = all_variants(gpu)
    assert len(set(variants)) == len(variants)
    for kernel in ATTENTION_KERNELS:
        if not ATTENTION_KERNELS[kernel].runs_on(gpu):
            assert kernel not in {v.kernel for v in variants}
            continue
        for head_dims in ATTENTION_KERNELS[kernel].head_dims(gpu):
            shapes = {
                TileShape(*v[4:10])
                for v in variants
                if v.kernel == kernel and (v.head_dim, v.head_dim_v) == head_dims
            }
            assert shapes == set(ATTENTION_KERNELS[kernel].tiles(gpu, head_dims))
            kinds = {(v.dtype, v.causal) for v in variants if v.kernel == kernel}
            assert kinds == {
                (dtype, causal)
                for dtype in ATTENTION_KERNELS[kernel].dtypes
                for causal in (False, True)
            }


def test_all_variants_for_hopper() -> None:
    """Its own kernel is one of sm_90a, and comes with the others."""
    others = all_variants(NO_SM90A)
    assert "fa3_wgmma" not in {v.kernel for v in others}
    own = [v for v in all_variants(H200) if v not in others]
    assert own
    assert {v.kernel for v in own} == {"fa3_wgmma"}
    assert {v.dtype for v in own} == {"float16", "bfloat16"}


# --- choices ---


def problem_of(causal: Any = True, **changes: Any) -> Problem:
    features = (Causal(),) if causal else ()
    base = Problem("float16", 2, 32, 8, 4096, 4096, 128, 128, 0.1, features)
    return base._replace(**changes)


@pytest.mark.parametrize("gpu", [*NAMED, NO_SM90A], ids=lambda gpu: f"{gpu.name}-{gpu.arch}")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_default_kernel(gpu: Device, dtype: str) -> None:
    chosen = plan_tiles(problem_of(dtype=dtype), gpu)
    of_16_bits = "fa3_wgmma" if gpu.arch == "sm_90a" else "fa2_mma"
    assert chosen.variant.kernel == ("fa2_fp32" if dtype == "float32" else of_16_bits)
    assert chosen.reason == f"default for {dtype}"


@pytest.mark.parametrize("seq_q", [1, 1000, 5000])
def test_no_keys(seq_q: int) -> None:
    """TMA cannot describe an array of none."""
    none = problem_of(seq_q=seq_q, seq_kv=0)
    chosen = plan_tiles(none, H200)
    assert chosen.variant.kernel == "fa2_mma"
    assert chosen.reason.startswith("no keys")
    assert chosen._replace(reason="") == plan_tiles(none, H200, "fa2_mma")._replace(reason="")
    with pytest.raises(ValueError, match=r"^kernel: fa3_wgmma needs at least one key, k has seq 0"):
        plan_tiles(none, H200, "fa3_wgmma")
    with pytest.raises(ValueError, match=r"^kernel: .*fa3_wgmma.* it needs at least one key"):
        plan_tiles(none, H200, plan_tiles(problem_of(seq_q=seq_q), H200).variant)


def test_no_keys_whatever_a_table_says() -> None:
    """Problems without keys are in the class of those with few."""
    few, none = problem_of(seq_kv=1), problem_of(seq_kv=0)
    shape = TileShape(128, 64, 2, 12, 1)
    for kernel in ("fa3_wgmma", "fa2_mma"):
        entry = Entry(kernel, shape._replace(warps=12 if kernel == "fa3_wgmma" else 8))
        table = Table("any", "", "2026-11-21", "", {problem_class(few, H200): entry})
        assert plan_tiles(few, H200, table=table).variant.kernel == kernel
        assert "tuned" in plan_tiles(few, H200, table=table).reason
        assert plan_tiles(none, H200, table=table).variant.kernel == "fa2_mma"


def test_few_queries_take_a_tile_of_fewer_rows() -> None:
    long = plan_tiles(problem_of(), H200)
    for few in ({"seq_q": 1}, {"seq_q": 64}, {"batch": 1, "heads_q": 8, "seq_q": 500}):
        short = plan_tiles(problem_of(**few), H200)
        assert short.variant.bm < long.variant.bm


# --- the kernel for Hopper ---


@given(problems(st.integers(1, 3000)), st.integers(1, 300))
def test_blocks_stay_for_all_tiles(problem: Problem, sm_count: int) -> None:
    """As many as run at once, or as there are tiles."""
    assume(problem.dtype != "float32")
    gpu = H200._replace(sm_count=sm_count)
    chosen = plan_tiles(problem, gpu)
    assert chosen.variant.kernel == "fa3_wgmma"
    at_once = sm_count * chosen.variant.blocks_per_sm
    assert chosen.grid == min(tiles(chosen, problem), at_once)


def test_one_line() -> None:
    chosen = plan_tiles(problem_of(), H200)
    line = str(chosen)
    assert "\n" not in line
    for word in ("fa3_wgmma<float16, 128, 128", "grid=132", "block=384", "smem=", "pack=1"):
        assert word in line
    assert f"section_heads={chosen.section_heads} " in line
    assert line.endswith("(default for float16)")
    assert "block=128" in str(plan_tiles(problem_of(), H200, "fa2_mma"))


# --- what is refused ---

VARIANT = plan_tiles(problem_of(), H200).variant

KERNEL_ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "number": (3, TypeError, "kernel must be a str or a Variant, not int"),
    "plain tuple": (tuple(VARIANT), TypeError, "kernel must be .* not tuple"),
    "bytes": (b"fa2_mma", TypeError, "kernel must be .* not bytes"),
    "unknown": ("fa9", ValueError, "kernel must be one of fa3_wgmma, .* not 'fa9'$"),
    "of decode": ("decode", ValueError, "kernel must be .* not 'decode', which is for cufa.decode"),
    "variant of decode": (
        Variant("decode", "float16", 128, 128, 16, 16, 3, 4, 1, kv="Contiguous"),
        ValueError,
        "kernel: .* decode is for cufa.decode",
    ),
    "empty": ("", ValueError, "kernel must be one of"),
    "another dtype": ("fa2_fp32", ValueError, "kernel: fa2_fp32 takes float32, q has float16"),
    "fa1 for 16 bits": ("fa1_fp32", ValueError, "kernel: fa1_fp32 takes float32, q has float16"),
    "variant of another dtype": (
        VARIANT._replace(dtype="bfloat16"),
        ValueError,
        "kernel: .* is for bfloat16, q has float16",
    ),
    "variant of another kernel": (
        VARIANT._replace(kernel="fa9"),
        ValueError,
        "kernel: .* kernel must be one of",
    ),
    "variant of an unknown dtype": (
        VARIANT._replace(dtype="int8"),
        ValueError,
        "kernel: .* takes float16 or bfloat16, not int8",
    ),
    "variant of no number": (
        VARIANT._replace(bm=None),  # type: ignore[arg-type]
        ValueError,
        "kernel: .* integers",
    ),
    "narrow": (VARIANT._replace(head_dim=64), ValueError, r"kernel: .* \(64, 128\) are less than"),
    "narrow V": (
        VARIANT._replace(head_dim_v=64),
        ValueError,
        r"kernel: .* \(128, 64\) are less than",
    ),
    "not causal": (
        VARIANT._replace(score=()),
        ValueError,
        r"kernel: .* its score is \(\), the call's \('Causal',\)",
    ),
    "illegal": (VARIANT._replace(bm=100), ValueError, "kernel: .* bm must be a multiple"),
    "too large": (VARIANT._replace(stages=9), ValueError, "kernel: .* shared memory .* h200 has"),
    "too large for fa2_mma": (
        plan_tiles(problem_of(), H200, "fa2_mma").variant._replace(stages=9),
        ValueError,
        "kernel: .* shared memory .* h200 has",
    ),
}


@pytest.mark.parametrize("case", sorted(KERNEL_ERRORS))
def test_kernel_that_cannot_run(case: str) -> None:
    kernel, error, message = KERNEL_ERRORS[case]
    with pytest.raises(error, match=f"^{message}"):
        plan_tiles(problem_of(), H200, kernel)


@pytest.mark.parametrize("gpu", [g for g in [*NAMED, NO_SM90A] if g.arch != "sm_90a"])
def test_kernel_of_another_gpu(gpu: Device) -> None:
    with pytest.raises(
        ValueError, match=f"^kernel: fa3_wgmma is for sm_90a, {gpu.name} is {gpu.arch}$"
    ):
        plan_tiles(problem_of(), gpu, "fa3_wgmma")
    with pytest.raises(ValueError, match=f"^kernel: .* is for sm_90a, not for {gpu.arch}$"):
        plan_tiles(problem_of(), gpu, VARIANT)


@pytest.mark.parametrize("kernel", [None, "fa2_mma", VARIANT])
def test_gpu_before_sm_80(kernel: str | Variant | None) -> None:
    turing = H200._replace(name="t4", compute_capability=75)
    with pytest.raises(ValueError, match=r"^device: t4 has compute capability 7\.5, 8\.0 is"):
        plan_tiles(problem_of(), turing, kernel)


@pytest.mark.parametrize("kernel", [None, VARIANT])
def test_more_blocks_than_a_grid_has(kernel: Variant | None) -> None:
    problem = problem_of(batch=2**20, heads_q=2**10, seq_q=1000)
    with pytest.raises(ValueError, match=r"^q: batch 1048576 x heads 1024 x seq 1000 needs"):
        plan_tiles(problem, H200, kernel)


@pytest.mark.parametrize("short_of_most", [0, 263, 264])
@pytest.mark.parametrize("causal", [False, True])
def test_as_many_tiles_as_can_be_counted(short_of_most: int, causal: bool) -> None:
    one = problem_of(heads_q=1, heads_kv=1, seq_q=1, causal=causal)
    problem = one._replace(batch=MAX_GRID - short_of_most)
    assert_fits(plan_tiles(problem, H200, "fa2_mma"), problem, H200)
    try:
        chosen = plan_tiles(problem, H200)
    except ValueError:
        assert short_of_most < 264
    else:
        assert_fits(chosen, problem, H200)


@pytest.mark.parametrize(("name", "field"), [("q", "seq_q"), ("k", "seq_kv")])
def test_lengths_beyond_32_bits(name: str, field: str) -> None:
    changes = {"batch": 1, "heads_q": 1, "heads_kv": 1}
    longest = problem_of(**changes, **{field: 2**31 - 257})
    assert_fits(plan_tiles(longest, H200), longest, H200)
    with pytest.raises(ValueError, match=rf"^{name} has seq 2147483392, more than"):
        plan_tiles(problem_of(**changes, **{field: 2**31 - 256}), H200)


@given(problems(st.integers(1, 100)), st.sampled_from(["bm", "bn"]), st.integers(257, 5000))
def test_forced_tiles_stay_within_32_bits(problem: Problem, field: str, size: int) -> None:
    """Tiles that are larger than those of the tables, at the greatest lengths."""
    longest = 2**31 - 257
    problem = problem._replace(batch=1, heads_q=1, heads_kv=1, seq_q=longest, seq_kv=longest)
    variant = plan_tiles(problem, H200).variant._replace(stages=1, blocks_per_sm=1)
    size = -(-size // 128) * 128
    variant = variant._replace(bm=size) if field == "bm" else variant._replace(bn=size)
    try:
        chosen = plan_tiles(problem, H200, variant)
    except ValueError:
        return
    assert_fits(chosen, problem, H200)


# --- explain on NumPy arrays ---


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((7, 8), "bhsd"), ((2, 7, 8), "bhsd"), ((2, 3, 7, 8), "bhsd"), ((2, 3, 7, 8), "bshd")],
)
def test_explain_on_numpy_arrays(shape: tuple[int, ...], layout: Layout) -> None:
    x = np.ones(shape, np.float32)
    out = np.full(shape, 7, np.float32)
    chosen = cufa.explain(x, x, x, layout=layout, causal=True, out=out, return_lse=True)
    assert isinstance(chosen, cpu.Plan)
    assert "CPU" in str(chosen)
    assert "\n" not in str(chosen)
    assert np.all(out == 7)


@pytest.mark.parametrize("kernel", ["fa2_fp32", "fa9", VARIANT, 3])
def test_explain_on_numpy_arrays_takes_no_kernel(kernel: Any) -> None:
    x = np.ones((7, 8), np.float32)
    for function in (cufa.explain, cufa.attention):
        with pytest.raises(ValueError, match=r"^kernel must be None for NumPy arrays"):
            function(x, x, x, kernel=kernel)
