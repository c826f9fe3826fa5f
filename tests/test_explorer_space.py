"""explorer/space.py: which variants are looked at."""

from __future__ import annotations

from typing import Any

import pytest

from cufa import device
from cufa.explorer.occupancy import register_bound
from cufa.explorer.space import variants
from cufa.explorer.tune import entry_of
from cufa.planner.plan import plan_tiles
from cufa.problem.problem import Problem
from cufa.specs import ATTENTION_KERNELS, KERNELS, default_kernel
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

H200 = device.named("h200")
GPUS = [device.named(name) for name in ("a100", "rtx3090", "h200", "b200", "rtx5090")]
on_every_gpu = pytest.mark.parametrize(
    ("gpu", "kernel"),
    [
        pytest.param(gpu, kernel, id=f"{gpu.name}-{kernel}")
        for gpu in GPUS
        for kernel in sorted(ATTENTION_KERNELS)
        if ATTENTION_KERNELS[kernel].runs_on(gpu)
    ],
)


def problem_of(head_dim: int = 128, head_dim_v: int | None = None, **options: Any) -> Problem:
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    options = {"dtype": "bfloat16", "causal": True, **options}
    q = (2, 16, 8192, head_dim)
    return Problem.of_shapes(q, q, (2, 16, 8192, head_dim_v), **options)


def test_every_kernel_of_attention_has_a_default_space() -> None:
    assert [spec.name for spec in KERNELS.values() if spec.space] == list(ATTENTION_KERNELS)


def shape_of(variant: Variant) -> TileShape:
    return entry_of(variant).shape


@on_every_gpu
def test_default_space(gpu: device.Device, kernel: str) -> None:
    """All legal and different, with all that the planner could choose for these head dims."""
    dtype = ATTENTION_KERNELS[kernel].dtypes[0]
    for head_dims in ATTENTION_KERNELS[kernel].head_dims(gpu):
        problem = problem_of(*head_dims, dtype=dtype)
        found = variants(problem, gpu, [kernel])
        assert len(set(found)) == len(found)
        for variant in found:
            assert variant.illegal(gpu) is None, variant
            assert variant[:4] == (kernel, dtype, *head_dims)
            assert variant.causal
        shapes = {shape_of(variant) for variant in found}
        planned = (
            found[0]._replace(**x._asdict())
            for x in ATTENTION_KERNELS[kernel].tiles(gpu, head_dims)
        )
        assert shapes.issuperset(shape_of(v) for v in planned if v.illegal(gpu) is None)
        # Variants with the same bound of registers would be the same machine code.
        bounds = {
            (v._replace(blocks_per_sm=1), register_bound(gpu, v.threads, v.blocks_per_sm))
            for v in found
        }
        assert len(bounds) == len(found)


@on_every_gpu
def test_bound_of_registers_drops_nothing_that_the_planner_uses(
    gpu: device.Device, kernel: str
) -> None:
    space = ATTENTION_KERNELS[kernel].space
    assert space is not None
    for head_dims in ATTENTION_KERNELS[kernel].head_dims(gpu):
        for shape in ATTENTION_KERNELS[kernel].tiles(gpu, head_dims):
            variant = Variant(
                kernel,
                ATTENTION_KERNELS[kernel].dtypes[0],
                *head_dims,
                **shape._asdict(),
                score=("Causal",),
            )
            bound = register_bound(gpu, variant.threads, variant.blocks_per_sm)
            assert space.registers(variant) <= bound, variant


def test_default_space_is_neither_poor_nor_slow_to_compile() -> None:
    for kernel in ("fa2_mma", default_kernel("bfloat16", H200).name):
        assert 40 <= len(variants(problem_of(), H200, [kernel])) <= 120


def test_default_kernel_is_the_planners() -> None:
    for gpu in GPUS:
        for dtype in ("bfloat16", "float32"):
            found = variants(problem_of(dtype=dtype), gpu)
            assert {v.kernel for v in found} == {default_kernel(dtype, gpu).name}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seq", [1, 300, 8192])
def test_first_is_what_the_planner_takes(dtype: str, seq: int) -> None:
    shape = (1, 1, seq, 80)
    problem = Problem.of_shapes(shape, shape, shape, dtype=dtype)
    assert variants(problem, H200)[0] == plan_tiles(problem, H200).variant


def test_several_kernels() -> None:
    problem = problem_of(64, dtype="float32")
    both = variants(problem, H200, ["fa1_fp32", "fa2_fp32"])
    apart = [variants(problem, H200, [kernel]) for kernel in ("fa1_fp32", "fa2_fp32")]
    assert both == apart[0] + apart[1]


def test_tiles_that_must_spill_are_left_out_unless_asked_for() -> None:
    """128 x 256 on four warps would hold 384 accumulators a thread."""
    problem = problem_of()
    for variant in variants(problem, H200, ["fa2_mma"]):
        accumulators = variant.bm * (variant.bn + 128) / variant.threads
        assert accumulators <= 255
    asked = variants(problem, H200, ["fa2_mma"], {"bm": (128,), "bn": (256,), "warps": (4,)})
    assert [shape_of(v) for v in asked] == [TileShape(128, 256, 1, 4, 1)]


def test_mapping_replaces_what_it_names() -> None:
    problem = problem_of()
    found = variants(problem, H200, ["fa2_mma"], {"bn": (48, 176), "stages": [2]})
    assert {v.bn for v in found} == {48, 176}
    assert {v.stages for v in found} == {2}
    assert {v.bm for v in found} == {64, 128, 256, 192}


def test_register_bounds_that_are_asked_for_are_all_tried() -> None:
    space = {"bm": (64,), "bn": (64,), "stages": (1,), "warps": (4,), "blocks_per_sm": (1, 2, 4)}
    found = variants(problem_of(), H200, ["fa2_mma"], space)
    assert [v.blocks_per_sm for v in found] == [1, 2, 4]


def test_head_dims_can_be_other_than_the_planners() -> None:
    space = {"head_dim": (64, 80, 96), "head_dim_v": (80,)}
    found = variants(problem_of(72), H200, ["fa2_mma"], space)
    assert {(v.head_dim, v.head_dim_v) for v in found} == {(80, 80), (96, 80)}


def test_illegal_products_are_left_out() -> None:
    found = variants(problem_of(), H200, space={"bm": (64, 100), "bn": (64, 65)})
    assert {(v.bm, v.bn) for v in found} == {(64, 64)}


def test_a_switch_can_be_set() -> None:
    for values in ((True,), (False,), (0, 1)):
        found = variants(problem_of(), H200, ["fa3_wgmma"], {"ping_pong": values})
        assert {v.ping_pong for v in found} == set(map(bool, values))
    assert all(type(v.ping_pong) is bool for v in found)


def test_variants_are_taken_as_they_are() -> None:
    good = plan_tiles(problem_of(), H200).variant
    bad = good._replace(bm=100)
    assert variants(problem_of(), H200, space=[bad, good, bad]) == [bad, good]


@pytest.mark.parametrize(
    ("space", "error", "message"),
    [
        ({"BN": (64,)}, ValueError, r"'BN' is none of bm, bn, stages, "),
        ({"causal": (True,)}, ValueError, "'causal' is none of"),
        ({"bn": 64}, TypeError, "bn must have a sequence of integers, not 64"),
        ({"bn": "64"}, TypeError, "bn must have a sequence of integers, not '64'"),
        ({"bn": (64.0,)}, TypeError, r"bn must have integers, not \(64.0,\)"),
        ({"bn": (65,)}, ValueError, r"nothing legal is left on h200 of bn in \[65\]"),
        ({"bn": ()}, ValueError, r"nothing legal is left on h200 of bn in \[\]"),
        ([], ValueError, "space has no variant"),
        (["fa2_mma"], TypeError, "must map template arguments"),
        ("fa2_mma", TypeError, "must map template arguments"),
        (3, TypeError, "must map template arguments"),
        (b"ab", TypeError, "must map template arguments"),
        (plan_tiles(problem_of(), H200).variant, TypeError, "must map template arguments"),
    ],
)
def test_errors(space: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        variants(problem_of(), H200, space=space)


def test_unknown_kernel_and_one_of_another_dtype() -> None:
    with pytest.raises(ValueError, match=r"must be one of .*, not 'fa9'"):
        variants(problem_of(), H200, ["fa9"])
    with pytest.raises(ValueError, match="fa1_fp32 takes float32, q has bfloat16"):
        variants(problem_of(), H200, ["fa1_fp32"])


def test_kernels_beside_variants() -> None:
    with pytest.raises(ValueError, match=r"^kernels: "):
        variants(problem_of(), H200, ["fa2_mma"], [plan_tiles(problem_of(), H200).variant])
