"""variant.py: the C++ name, the shared memory and the legality of an instantiation."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cufa import device
from cufa.planner.fp8 import plan_fp8
from cufa.planner.rules import all_variants
from cufa.problem.problem import Problem
from cufa.specs import ATTENTION_KERNELS, BACKWARD_KERNELS, FP8_KERNELS, KERNELS
from cufa.specs.fa3_wgmma import WGMMA_WIDTHS
from cufa.specs.template_arguments import SWITCHES
from cufa.specs.variant import BackwardVariant, Fp8Variant, Variant

H200 = device.named("h200")
MMA = Variant("fa2_mma", "bfloat16", 128, 64, 128, 32, 2, 4, 2, score=("Causal",))
FP32 = Variant("fa2_fp32", "float32", 64, 96, 64, 32, 2, 4, 2)
FA1 = Variant("fa1_fp32", "float32", 80, 48, 32, 16, 1, 8, 1)
FA3 = Variant(
    "fa3_wgmma", "bfloat16", 128, 64, 128, 80, 2, 12, 1, ping_pong=True, score=("Causal",)
)
BWD = BackwardVariant("bwd_wgmma", "bfloat16", 64, 64, 64, 128, 2, 12, 1)
FP8 = Fp8Variant("fp8_wgmma", "bfloat16", 128, 128, 192, 128, 4, 16, 1, ping_pong=True)

GPUS = ("a100", "rtx3090", "rtx4090", "h100", "h200", "b200", "rtx5090")

#: The part of each block's shared memory that the hardware keeps.
RESERVED_BYTES = 1024


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (MMA, "fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, Score<Causal>, Dense>"),
        (
            MMA._replace(dtype="float16"),
            "fa2_mma<float16, 128, 64, 128, 32, 2, 4, 2, Score<Causal>, Dense>",
        ),
        (FP32, "fa2_fp32<float, 64, 96, 64, 32, 2, 4, 2, Score<>, Dense>"),
        (FA1, "fa1_fp32<float, 80, 48, 32, 16, 1, 8, 1, Score<>, Dense>"),
        (FA3, "fa3_wgmma<bfloat16, 128, 64, 128, 80, 2, 12, 1, true, Plain, Score<Causal>, Dense>"),
        (
            FA3._replace(dtype="float16", ping_pong=False),
            "fa3_wgmma<float16, 128, 64, 128, 80, 2, 12, 1, false, Plain, Score<Causal>, Dense>",
        ),
        (
            FA3._replace(score=()),
            "fa3_wgmma<bfloat16, 128, 64, 128, 80, 2, 12, 1, true, Plain, Score<>, Dense>",
        ),
        (
            FA3._replace(score=("Softcap",)),
            "fa3_wgmma<bfloat16, 128, 64, 128, 80, 2, 12, 1, true, General, Score<Softcap>, Dense>",
        ),
        (
            FA3._replace(schedule="General"),
            "fa3_wgmma<bfloat16, 128, 64, 128, 80, 2, 12, 1, true, General, Score<Causal>, Dense>",
        ),
    ],
)
def test_name_expression(variant: Variant, expected: str) -> None:
    assert variant.name_expression == expected
    assert str(variant) == expected


@pytest.mark.parametrize("name", ["a100", "rtx3090", "h200", "rtx5090"])
def test_what_is_printed_can_be_read(name: str) -> None:
    for variant in all_variants(device.named(name)):
        assert Variant.parse(str(variant)) == variant


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        *((kernel, Variant) for kernel in KERNELS),
        *((kernel, BackwardVariant) for kernel in BACKWARD_KERNELS),
        *((kernel, Fp8Variant) for kernel in FP8_KERNELS),
    ],
)
def test_what_any_kernel_prints_can_be_read(kernel: str, family: type[Variant]) -> None:
    first = family(kernel, "float16", 64, 96, 128, 32, 2, 12, 1)
    switches: dict[str, Any] = {name: True for name in SWITCHES if name in first.spec.arguments}
    for score, kv in (((), "Dense"), (("Causal", "Softcap"), "Paged")):
        variant = first._replace(**switches, score=score, kv=kv)
        found = Variant.parse(str(variant))
        assert found == variant
        assert type(found) is family


@pytest.mark.parametrize("head_dim", [64, 256])
def test_arguments_that_a_kernel_does_not_print(head_dim: int) -> None:
    shape = (1, 2, 128, head_dim)
    variant = plan_fp8(Problem.of_shapes(shape, shape, shape), H200).variant
    found = Variant.parse(str(variant))
    assert found == variant
    assert found.threads == 2 * found.bm + 128


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fa2_mma<bfloat16,128,64,128,32,2,4,2, Score<Causal>, Dense>", MMA),
        ("  fa2_mma < bfloat16 , 128 ,64, 128,32,2, 4,2 , Score <Causal> ,Dense >\n", MMA),
        ("fa3_wgmma<bfloat16,128,64,128,80,2,12,1, true, Score<Causal>, Dense>", FA3),
        ("fa3_wgmma<bfloat16,128,64,128,80,2,12,1,true,Plain,Score<Causal>,Dense>", FA3),
        (
            "fa3_wgmma<bfloat16, 128,64,128,80,2,12,1,true , General , Score<Causal>,Dense>",
            FA3._replace(schedule="General"),
        ),
        (" fa3_wgmma <bfloat16 ,128, 64,128,80,2,12,1 , true , Score < Causal >,Dense> ", FA3),
    ],
)
def test_spaces_do_not_matter(text: str, expected: Variant) -> None:
    found = Variant.parse(text)
    assert found == expected
    assert type(found.score) is tuple
    assert type(found.ping_pong) is bool


def test_causal_is_a_part_of_the_score() -> None:
    assert MMA.causal
    assert not FP32.causal


def test_what_is_illegal_can_be_read() -> None:
    variant = Variant.parse("fa2_mma<float, 1, 2, 3, 4, 5, 6, 0, Score<>, Dense>")
    assert variant == Variant("fa2_mma", "float32", 1, 2, 3, 4, 5, 6, 0)
    assert Variant.parse(str(variant._replace(kv="Paged"))) == variant._replace(kv="Paged")


FORM = r"^a variant looks like fa2_mma<bfloat16, .* Score<Causal>, Dense>, not '"
ARGUMENTS = (
    r": fa._.* takes the arguments type, head_dim, .*, blocks_per_sm, "
    r"(ping_pong, schedule, )?score, kv$"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", FORM),
        ("fa2_mma", FORM),
        ("fa2_mma<bfloat16, 128>", FORM),
        ("fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, Score<Causal>, Dense>", ARGUMENTS),
        ("fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, 1, Score<Causal>, Dense>", ARGUMENTS),
        ("fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, 1>", FORM),
        ("fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, -2, Score<Causal>, Dense>", FORM),
        ("fa2_mma<bfloat16, 128, 64, 128.0, 32, 2, 4, 2, Score<Causal>, Dense>", FORM),
        ("fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, Score<Causal>, Dense> x", FORM),
        ("fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, false, Score<Causal>, Dense>", ARGUMENTS),
        ("fa3_wgmma<bfloat16, 128, 64, 128, 80, 2, 12, 1, Score<Causal>, Dense>", ARGUMENTS),
        ("fa3_wgmma<bfloat16, 128, 64, 128, 80, 2, 12, 1, true, 1>", FORM),
        ("fa3_wgmma<bfloat16, 128, 64, 128, 80, 2, 12, true, Score<Causal>, Dense>", ARGUMENTS),
        (
            "fa3_wgmma<bfloat16, 128, 64, 128, 80, 2, 12, 1, true, true, Score<Causal>, Dense>",
            ARGUMENTS,
        ),
        (
            "fa3_wgmma<bfloat16, 128, 64, 128, 80, 2, 12, 1, true, Best, Score<Causal>, Dense>",
            "the schedule of fa3_wgmma must be Plain or General, not 'Best'",
        ),
        (
            "fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, Plain, Score<Causal>, Dense>",
            "fa2_mma has no schedules: leave 'Plain' out",
        ),
        ("fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, true>", FORM),
        ("fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, Score<Causal>>", FORM),
        ("fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, Score<Causal,>, Dense>", FORM),
        ("fa2_mma<bfloat16, 128, 64, 128, 3 2, 2, 4, 2, Score<Causal>, Dense>", FORM),
        (
            "fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, Score<Causal, Casual>, Dense>",
            "a part of the score must be one of .*Causal, .*, not 'Casual'",
        ),
        (
            "fa9<bfloat16, 128, 64, 128, 32, 2, 4, 2, Score<Causal>, Dense>",
            "kernel must be one of fa3_wgmma, .*, bwd_mma, .*, fp8_wgmma, not 'fa9'",
        ),
        (
            "fa2_mma<bfloat, 128, 64, 128, 32, 2, 4, 2, Score<Causal>, Dense>",
            "type must be one of float16, bfloat16, float, not 'bfloat'",
        ),
        (
            "fa2_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, Score<>, Quantized<Dense>>",
            "fa2_mma has its kv as Dense, not Quantized<Dense>$",
        ),
        (
            "fp8_wgmma<bfloat16, 128, 64, 128, 32, 2, true, Score<>, Padded>",
            "fp8_wgmma has its kv as Quantized<Padded>, not Padded$",
        ),
        (
            "fp8_wgmma<bfloat16, 128, 64, 128, 32, 2, true, Score<>, Quantized<Dense>",
            "a variant looks like",
        ),
        (
            "fp8_wgmma<bfloat16, 128, 64, 128, 32, 2, 12, 1, true, Score<>, Quantized<Dense>>",
            "fp8_wgmma takes the arguments type, head_dim, .*, stages, ping_pong, score, kv$",
        ),
        (
            "bwd_mma<bfloat16, 128, 64, 128, 32, 2, 4, 2, true, Score<>, Dense>",
            "bwd_mma takes the arguments type, head_dim, .*, blocks_per_sm, score, kv$",
        ),
        ("bwd_prepare<bfloat16, 128, Score<>, Dense>", "one of .* not 'bwd_prepare'"),
    ],
)
def test_what_is_no_variant(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Variant.parse(text)


def test_tiles_without_rows_are_illegal() -> None:
    """They can be read, but have no size."""
    text = "fp8_wgmma<bfloat16, 64, 64, 0, 128, 4, true, Score<>, Quantized<Dense>>"
    illegal = Variant.parse(text).illegal(H200)
    assert illegal == "template arguments must be positive integers"


def test_only_text_can_be_read() -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match=r"^text must be a string, not NoneType"):
        Variant.parse(nothing)


def test_threads() -> None:
    assert MMA.threads == 128
    assert FA1.threads == 256


def test_shared_memory_holds_the_tiles() -> None:
    """Q once, K and V once a stage; what else a block keeps is small."""
    q, k, v = 128 * 128, 32 * 128, 32 * 64
    assert 0 <= MMA.smem_bytes - 2 * (q + 2 * (k + v)) < 256
    q, k, v = 64 * 64, 32 * 64, 32 * 96
    assert 0 <= FP32.smem_bytes - 4 * (q + 2 * (k + v)) < 256
    # Rows of Q, K and P are 4 floats longer.
    q, k, v, p = 32 * (80 + 4), 16 * (80 + 4), 16 * 48, 32 * (16 + 4)
    assert FA1.smem_bytes == 4 * (q + k + v + p)


def test_shared_memory_holds_the_output_of_fa2_mma() -> None:
    """It goes through the place of the tiles, and may be larger than they."""
    wide = MMA._replace(head_dim=16, head_dim_v=256, bm=128, bn=16, stages=1)
    assert wide.smem_bytes == 2 * 128 * 256


def aligned(size: int, step: int) -> int:
    return -(-size // step) * step


#: Tiles of all sizes that fa3_wgmma has the instructions for.
FA3_TILES = [
    Variant("fa3_wgmma", "float16", d, dv, bm, bn, stages, bm // 16 + 4, blocks)
    for bm in (64, 128, 192, 256)
    for bn in WGMMA_WIDTHS
    for d, dv in ((32, 32), (64, 128), (96, 96), (80, 48), (192, 128), (256, 256))
    for stages in (1, 2, 3)
    for blocks in (1, 2, 3)
]


def fa3_memory(variant: Variant) -> tuple[int, int]:
    """Return how many tiles of Q a block holds, and the bytes of all it holds.

    Tiles begin where a swizzle does. A second and a third tile of Q are held where they fit, when
    the blocks of a multiprocessor share its memory.
    """
    d, dv = variant.head_dim, variant.head_dim_v
    atom = 8 * 2 * min(d & -d, 64)  # bytes of eight rows of a panel: the swizzle's period
    k_tile, v_tile = (aligned(2 * variant.bn * n, atom) for n in (d, dv))
    q_tile = aligned(2 * variant.bm * max(d, dv), atom)  # O may leave through it
    kv = variant.stages * (k_tile + v_tile)
    slots = 1
    while slots < 3 and variant.blocks_per_sm * (kv + (slots + 1) * q_tile + 1024) <= 227 * 1024:
        slots += 1
    # Two barriers of 8 bytes a tile of Q, K and V; for one of Q three numbers, and four for each 64
    # rows that see keys of their own, twice where its slot is given free before O is written.
    numbers = 3 + 4 * (variant.bm // 64 if variant.causal else 1)
    early = slots == 1 or (slots == 2 and variant.bm <= 128)
    small = slots * 16 + slots * (1 + early) * numbers * 4 + 2 * variant.stages * 16
    assert small <= 1024
    return slots, kv + slots * q_tile + small


def test_shared_memory_of_fa3_wgmma() -> None:
    for variant in FA3_TILES:
        assert variant.smem_bytes == fa3_memory(variant)[1], variant


def test_tiles_of_fa3_wgmma() -> None:
    legal = 0
    for variant in FA3_TILES:
        complaint = variant.illegal(H200)
        fits = fa3_memory(variant)[1] <= 227 * 1024
        threads = variant.threads * variant.blocks_per_sm
        # A register for each two accumulators of a warpgroup's row, and 30 more, at launch.
        roomy = 65536 // threads // 8 * 8 >= max(variant.bn, variant.head_dim_v) // 2 + 30
        if not fits or not roomy or threads > H200.threads_per_sm:
            assert complaint is not None, variant
            continue
        assert complaint is None, variant
        turns = variant._replace(ping_pong=True).illegal(H200)
        assert (turns is None) == (variant.bm > 64), variant
        legal += 1
    assert legal > len(FA3_TILES) // 4


@pytest.mark.parametrize(
    ("variant", "slots"),
    [
        (FA3._replace(head_dim=64, bn=128), 3),
        (FA3._replace(head_dim_v=128, bm=192, warps=16), 3),
        (FA3._replace(head_dim_v=128, bm=192, warps=16, stages=3), 2),
        (FA3._replace(head_dim_v=128, bm=192, warps=16, bn=96, stages=3), 1),
        (FA3._replace(head_dim=256, head_dim_v=256, bn=64), 1),
        (FA3._replace(head_dim=64, bm=64, warps=8, bn=64, blocks_per_sm=3, ping_pong=False), 3),
        (FA3._replace(bm=64, warps=8, blocks_per_sm=2, ping_pong=False), 3),
        (FA3._replace(bm=64, warps=8, blocks_per_sm=3, ping_pong=False), 1),
    ],
    ids=str,
)
def test_tiles_of_q_at_once(variant: Variant, slots: int) -> None:
    assert variant.illegal(H200) is None
    wide = max(variant.head_dim, variant.head_dim_v)
    kv = variant.stages * variant.bn * (variant.head_dim + variant.head_dim_v)
    assert variant.smem_bytes // 1024 == 2 * (kv + slots * variant.bm * wide) // 1024


@pytest.mark.parametrize("variant", [MMA, FP32, FA1, FA3, BWD, FP8])
def test_legal(variant: Variant) -> None:
    assert variant.illegal(H200) is None


#: A variant that is no longer legal, and the text of the reason.
ILLEGAL: dict[str, tuple[Variant, str]] = {
    "kernel": (MMA._replace(kernel="fa9"), "^kernel must be one of fa3_wgmma, .* not 'fa9'"),
    "mma float32": (MMA._replace(dtype="float32"), "takes float16 or bfloat16, not float32"),
    "fp32 float16": (FP32._replace(dtype="float16"), "takes float32, not float16"),
    "unknown dtype": (FA1._replace(dtype="int8"), "takes float32, not int8"),
    "fraction": (MMA._replace(bm=64.0), "integers"),  # type: ignore[arg-type]
    "string": (MMA._replace(stages="2"), "integers"),  # type: ignore[arg-type]
    "zero": (MMA._replace(bn=0), "positive"),
    "negative": (MMA._replace(stages=-1), "positive"),
    "no block": (FP32._replace(blocks_per_sm=0), "positive"),
    "tall": (MMA._replace(head_dim=16, head_dim_v=16, bm=512), "more than 256"),
    "wide": (MMA._replace(head_dim=16, head_dim_v=16, bn=272), "more than 256"),
    "head_dim": (MMA._replace(head_dim=272), "more than 256"),
    "head_dim_v": (FP32._replace(head_dim_v=288), "more than 256"),
    "mma head_dim step": (MMA._replace(head_dim=120), "multiples of 16"),
    "mma head_dim_v step": (MMA._replace(head_dim_v=72), "multiples of 16"),
    "fp32 head_dim step": (FP32._replace(head_dim=48), "multiples of 32"),
    "fp32 head_dim_v step": (FP32._replace(head_dim_v=80), "multiples of 32"),
    "fa1 head_dim step": (FA1._replace(head_dim=88), "multiples of 16"),
    "fa1 head_dim_v step": (FA1._replace(head_dim_v=40), "multiples of 16"),
    "fa1 stages": (FA1._replace(stages=2), "single stage"),
    "fa1 bm": (FA1._replace(bm=24), "bm must be a multiple"),
    "fa1 bn": (FA1._replace(bn=24), "bn"),
    "odd warps": (MMA._replace(warps=3, bm=96), "warps must be even"),
    "mma bm": (MMA._replace(bm=96), "bm must be a multiple of 64"),
    "mma bn": (MMA._replace(bn=24), "bn of 16"),
    "fp32 bm": (FP32._replace(bm=32), "bm must be a multiple of 64"),
    "threads": (FA1._replace(warps=64, bm=128), "threads"),
    "threads of a multiprocessor": (MMA._replace(blocks_per_sm=17), "17 blocks of 128 threads"),
    "fa3 float32": (FA3._replace(dtype="float32"), "takes float16 or bfloat16, not float32"),
    "fa3 bm": (
        FA3._replace(bm=96, warps=10),
        "bm must be a multiple of 64, and warps bm / 16 \\+ 4",
    ),
    "fa3 warps": (FA3._replace(warps=8), "bm must be a multiple of 64, and warps bm / 16 \\+ 4"),
    "fa3 tall": (FA3._replace(bm=320, warps=24), "more than 256"),
    "fa3 bn": (FA3._replace(bn=72), "bn must be one of 32, .*, 256 in fa3_wgmma"),
    "fa3 narrow bn": (FA3._replace(bn=16), "bn must be one of 32, .*, 256 in fa3_wgmma"),
    "fa3 bn of no wgmma here": (FA3._replace(bn=208, stages=1), "bn must be one of"),
    "fa3 head_dim step": (FA3._replace(head_dim=72), "multiples of 16"),
    "fa3 narrow V": (FA3._replace(head_dim=16, head_dim_v=16), "head_dim_v must be one of 32, .*"),
    "fa3 swizzles": (FA3._replace(head_dim_v=96), "must be swizzled alike"),
    "fa3 swizzles of narrow ones": (FA3._replace(head_dim=32, head_dim_v=80), "swizzled alike"),
    "fa3 turns of one": (FA3._replace(bm=64, warps=8), "ping_pong needs two warpgroups"),
    "fa3 shared memory": (FA3._replace(bn=256, stages=3), "bytes of shared memory .* has 232448"),
    "fa3 threads": (
        FA3._replace(head_dim=32, head_dim_v=32, bn=64, bm=192, warps=16, blocks_per_sm=5),
        "5 blocks of 512 threads",
    ),
    "fa3 schedule": (FA3._replace(schedule="Best"), "^fa3_wgmma has no schedule Best$"),
    "fa3 first K": (
        FA3._replace(head_dim=256, head_dim_v=256, schedule="Plain", score=("WindowLeft",)),
        "Plain with one slot of Q needs rows that begin with the first keys: take General",
    ),
    "a schedule of another kernel": (MMA._replace(schedule="Plain"), "has no schedule Plain"),
    "fa3 masked tiles": (
        FA3._replace(bm=192, bn=48, warps=16),
        "skips 3 masked tiles of keys: as many stages",
    ),
    "gradients' dtype": (BWD._replace(dtype="float32"), "takes float16 or bfloat16, not float32"),
    "8 bits' dtype": (FP8._replace(dtype="float32"), "takes float16 or bfloat16, not float32"),
    "gradients as attention": (Variant(*BWD), "^kernel must be one of fa3_wgmma, .* 'bwd_wgmma'"),
    "an unknown score": (FP32._replace(score=("Casual",)), "in a score, not Casual"),
    "a part that is twice there": (MMA._replace(score=("Causal",) * 2), "a part is twice"),
    "teams without a barrier": (
        Variant("decode", "bfloat16", 32, 32, 64, 16, 2, 32, 1, kv="Contiguous"),
        "there are 14, for 28 warps",
    ),
    "pages of more keys than lanes": (
        Variant("decode", "bfloat16", 64, 64, 16, 64, 2, 4, 1, kv="Paged"),
        "pages of at most 32 keys",
    ),
    "unknown K and V": (
        FA3._replace(kv="Paged"),
        "finds K and V by Dense or Padded or Varlen, not Paged",
    ),
    "ping_pong elsewhere": (MMA._replace(ping_pong=True), "fa2_mma has no ping_pong"),
    "shared memory": (MMA._replace(bn=256, stages=8), "bytes of shared memory .* h200 has 232448"),
}


@pytest.mark.parametrize("case", sorted(ILLEGAL))
def test_illegal(case: str) -> None:
    variant, reason = ILLEGAL[case]
    complaint = variant.illegal(H200)
    assert complaint is not None
    assert re.search(reason, complaint), complaint


@pytest.mark.parametrize(
    ("gpu", "arch"),
    [
        (device.named("a100"), "sm_80"),
        (H200._replace(compiles_sm90a=False), "sm_90"),
        (device.named("b200"), "sm_100"),
    ],
    ids=["a100", "h200 without sm_90a", "b200"],
)
def test_kernels_of_hopper_elsewhere(gpu: device.Device, arch: str) -> None:
    for variant in (FA3, BWD, FP8):
        assert variant.illegal(gpu) == f"{variant.kernel} is for sm_90a, not for {arch}"


def test_wide_outputs_of_fp32_are_split_over_two_warps() -> None:
    wide = FP32._replace(head_dim=256, head_dim_v=256, stages=1, blocks_per_sm=1)
    assert wide.illegal(H200) is None
    assert wide._replace(bm=32).illegal(H200) is None  # two warps share 16 rows
    # Each takes half of the columns, in pieces of 32.
    assert wide._replace(head_dim_v=192).illegal(H200) is None
    complaint = wide._replace(head_dim_v=224).illegal(H200)
    assert complaint is not None
    assert "multiples of" in complaint


gpus = pytest.mark.parametrize("name", GPUS)


@gpus
def test_what_the_planner_chooses_from_is_legal(name: str) -> None:
    gpu = device.named(name)
    variants = all_variants(gpu)
    assert len(set(variants)) == len(variants)
    hopper = {"fa3_wgmma"} if name in ("h100", "h200") else set()
    assert {v.kernel for v in variants} == {"fa1_fp32", "fa2_fp32", "fa2_mma"} | hopper
    for variant in variants:
        assert variant.illegal(gpu) is None, variant
        head_dims = (variant.head_dim, variant.head_dim_v)
        assert head_dims in ATTENTION_KERNELS[variant.kernel].head_dims(gpu)


@gpus
def test_blocks_that_shall_share_a_multiprocessor_fit_its_shared_memory(name: str) -> None:
    """Else registers are saved for blocks that cannot come."""
    gpu = device.named(name)
    too_many = [
        str(variant)
        for variant in all_variants(gpu)
        if variant.blocks_per_sm * (variant.smem_bytes + RESERVED_BYTES) > gpu.smem_per_sm
    ]
    assert too_many == []


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        (gpu, name)
        for gpu in GPUS
        for name, kernel in sorted(ATTENTION_KERNELS.items())
        if kernel.runs_on(device.named(gpu))
    ],
)
def test_every_head_dim_has_a_tile_that_holds_it(name: str, kernel: str) -> None:
    gpu = device.named(name)
    pairs = ATTENTION_KERNELS[kernel].head_dims(gpu)
    for head_dim in range(1, 257):
        for head_dim_v in range(1, 257):
            pair = ATTENTION_KERNELS[kernel].padded(gpu, head_dim, head_dim_v)
            assert pair in pairs
            assert pair[0] >= head_dim
            assert pair[1] >= head_dim_v


def test_a_smaller_gpu_refuses_what_a_larger_takes() -> None:
    large = Variant("fa2_mma", "float16", 256, 256, 64, 64, 2, 4, 1)
    assert large.illegal(device.named("h200")) is None
    assert large.illegal(device.named("a100")) is None
    complaint = large.illegal(device.named("rtx4090"))
    assert complaint is not None
    assert "rtx4090 has 101376" in complaint
