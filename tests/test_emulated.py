"""The kernels' source on the host, from `cufa.attention` on: results, and that waits end.

Copies and products end as late as they may, shared memory holds NaN before a block writes it, and
pages that cannot be read lie around each array.
"""

from __future__ import annotations

import itertools
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import score_mods
from emulated import Emulator, emulate, needs_compiler
from exhaustive import exhaustive
from played_gpu import Gpu, on_gpu
from reference import assert_accepted, random_inputs
from score_arrays import FEATURES, LIES, PAIRS, options_of, pairs

import cufa
from cufa import device
from cufa.planner import scheduler
from cufa.problem.problem import Problem
from cufa.specs.fa3_wgmma import q_slots
from cufa.specs.variant import Variant

pytestmark = needs_compiler

FA1 = "fa1_fp32<float, 32, 64, 32, 32, 1, 4, 2, Score<{score}>, Dense>"
FP32 = "fa2_fp32<float, 64, 64, 64, 32, 2, 4, 2, Score<{score}>, Dense>"
FP32_HALVES = "fa2_fp32<float, 32, 192, 32, 32, 1, 4, 1, Score<{score}>, Dense>"
MMA = "fa2_mma<bfloat16, 64, 64, 64, 64, 2, 4, 2, Score<{score}>, Dense>"
MMA_ONE_STAGE = "fa2_mma<float16, 32, 96, 128, 32, 1, 4, 2, Score<{score}>, Dense>"
#: Three slots of Q, or two, with which O leaves from registers.
FA3 = "fa3_wgmma<bfloat16, 64, 64, 64, 64, 3, 8, 3, false, Score<{score}>, Dense>"
FA3_TURNS = "fa3_wgmma<float16, 64, 64, 192, 128, 3, 16, 1, true, Score<{score}>, Dense>"
FA3_WIDE = "fa3_wgmma<bfloat16, 128, 128, 128, 128, 2, 12, 1, true, Score<{score}>, Dense>"
FA3_TWO_SLOTS = "fa3_wgmma<bfloat16, 192, 192, 128, 80, 2, 12, 1, false, Score<{score}>, Dense>"
#: Without room for arrays: two slots, with which O leaves as with three, and one.
FA3_TWO_OF_THREE = "fa3_wgmma<float16, 128, 128, 192, 80, 3, 16, 1, true, Score<{score}>, Dense>"
FA3_ONE_SLOT = "fa3_wgmma<bfloat16, 192, 192, 128, 112, 2, 12, 1, false, Score<{score}>, Dense>"
FA3_ONE_OF_THREE = "fa3_wgmma<float16, 128, 128, 192, 144, 2, 16, 1, true, Score<{score}>, Dense>"
#: Head dims of an odd number of steps of wgmma.
FA3_ODD = "fa3_wgmma<bfloat16, 80, 48, 64, 80, 2, 8, 1, false, Score<{score}>, Dense>"
FA3_ONE_STEP = "fa3_wgmma<float16, 16, 48, 128, 112, 2, 12, 1, true, Score<{score}>, Dense>"
ALL = [
    *(FA1, FP32, FP32_HALVES, MMA, MMA_ONE_STAGE),
    *(FA3, FA3_TURNS, FA3_WIDE, FA3_TWO_SLOTS),
]
#: A form of each kernel, with which all features always run.
ONE_OF_EACH = FP32, MMA, FA3
variants = pytest.mark.parametrize("form", ALL, ids=lambda form: form.split(", Score")[0])


def variant_of(form: str, causal: bool) -> Variant:
    return Variant.parse(form.format(score="Causal" if causal else ""))


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator()


@pytest.fixture(autouse=True)
def emulated(
    gpu: Gpu,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Emulator:
    """Play a GPU with two multiprocessors, on which blocks take several tiles.

    Warps take turns at random, or in order: in each test always the same way.
    """
    two = device.named("h200")._replace(sm_count=2)
    monkeypatch.setattr(device, "of_id", lambda device_id: two)
    emulate(monkeypatch, emulator)
    emulator.last_first, emulator.seed = False, crc32(request.node.name.encode()) % 8
    return emulator


def called(variant: Variant, *arrays: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the result and the log-sum-exp of a variant."""
    given = [on_gpu(x) for x in arrays]
    out, lse = cufa.attention(
        *given, causal=variant.causal, kernel=variant, return_lse=True, **options
    )
    return out.get(), lse.get()


def checked(variant: Variant, *arrays: np.ndarray) -> None:
    assert_accepted(*called(variant, *arrays), *arrays, causal=variant.causal)


def test_forms_have_slots() -> None:
    """As the names above say."""
    forms = (
        FA3,
        FA3_TURNS,
        FA3_WIDE,
        FA3_TWO_SLOTS,
        FA3_TWO_OF_THREE,
        FA3_ONE_SLOT,
        FA3_ONE_OF_THREE,
    )
    assert [q_slots(variant_of(form, False)) for form in forms] == [3, 3, 3, 2, 2, 1, 1]


@pytest.mark.parametrize(
    "form",
    [*ALL, FA3_TWO_OF_THREE, FA3_ONE_SLOT, FA3_ONE_OF_THREE, FA3_ODD, FA3_ONE_STEP],
    ids=lambda f: f.split(", Score")[0],
)
@pytest.mark.parametrize("causal", [False, True])
@exhaustive(one_in=2)
def test_odd_lengths(emulated: Emulator, rng: np.random.Generator, form: str, causal: bool) -> None:
    variant = variant_of(form, causal)
    d, dv = variant.head_dim, variant.head_dim_v
    emulated.last_first = causal
    checked(variant, *random_inputs(rng, variant.dtype, hq=2, hk=1, sq=201, sk=150, d=d, dv=dv))
    # A block that takes one tile, and no other.
    checked(variant, *random_inputs(rng, variant.dtype, sq=3, sk=230, d=d, dv=dv))


@pytest.mark.parametrize("form", [form for form in ALL if form is not FA1], ids=lambda f: f[:50])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (33, 20)},
        {"window": (70, None), "causal": "top-left", "softcap": 3.0},
    ],
    ids=["window", "top-left and softcap"],
)
@exhaustive(but=lambda form, options: form in ONE_OF_EACH or "softcap" in options, one_in=2)
def test_masks(rng: np.random.Generator, form: str, options: dict[str, Any]) -> None:
    variant = Variant.parse(form.format(score=""))
    d, dv = variant.head_dim, variant.head_dim_v
    for hq, hk, sq, sk in ((2, 1, 201, 150), (1, 1, 90, 333), (8, 2, 13, 250)):
        arrays = random_inputs(rng, variant.dtype, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
        given = [on_gpu(x) for x in arrays]
        plan: Any = cufa.explain(*given, **options)
        chosen = variant._replace(score=plan.variant.score)
        out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **options)
        assert_accepted(out.get(), lse.get(), *arrays, what=str(chosen), **options)


@pytest.mark.parametrize("form", [FA3_WIDE, FA3_ONE_SLOT], ids=lambda f: f.split(", Score")[0])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "softcap": 3.0}, {"window": (70, 20)}],
    ids=["plain", "softcap", "window"],
)
@exhaustive(but=lambda form, options: form is FA3_WIDE and "causal" in options)
def test_the_other_schedule(rng: np.random.Generator, form: str, options: dict[str, Any]) -> None:
    """Which schedule a kernel has changes how long it takes, and not what it computes."""
    variant = Variant.parse(form.format(score=""))
    d, dv = variant.head_dim, variant.head_dim_v
    arrays = random_inputs(rng, variant.dtype, hq=2, hk=1, sq=201, sk=333, d=d, dv=dv)
    given = [on_gpu(x) for x in arrays]
    plan: Any = cufa.explain(*given, **options)
    named = variant._replace(score=plan.variant.score)
    (schedule,) = {"Plain", "General"} - {named.named_schedule}
    other = named._replace(schedule=schedule)
    if "window" in options and form is FA3_ONE_SLOT:  # whose keys come in front of the next Q
        with pytest.raises(ValueError, match="take General"):
            cufa.attention(*given, kernel=other, **options)
        return
    out, lse = cufa.attention(*given, kernel=other, return_lse=True, **options)
    assert_accepted(out.get(), lse.get(), *arrays, what=str(other), **options)


@pytest.mark.parametrize(
    "form", [*(form for form in ALL if form is not FA1), FA3_ONE_SLOT], ids=lambda f: f[:50]
)
@pytest.mark.parametrize("name", FEATURES)
@exhaustive(but=lambda form, name: form in ONE_OF_EACH or name == "all", one_in=3)
def test_arrays_beside(rng: np.random.Generator, form: str, name: str) -> None:
    variant = Variant.parse(form.format(score=""))
    d, dv = variant.head_dim, variant.head_dim_v
    for sizes in ((1, 2, 1, 201, 150), (2, 8, 2, 13, 250)):
        b, hq, hk, sq, sk = sizes
        arrays = random_inputs(rng, variant.dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
        options = options_of(rng, name, sizes)
        given = [on_gpu(x) for x in arrays]
        there: dict[str, Any] = {
            k: on_gpu(x) if hasattr(x, "dtype") else x for k, x in options.items()
        }
        plan: Any = cufa.explain(*given, **there)
        chosen = variant._replace(score=plan.variant.score)
        if form is FA3_ONE_SLOT and chosen.illegal(device.named("h200")):
            pytest.skip("there is no room for biases and masks next to its K and V")
        out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **there)
        assert_accepted(out.get(), lse.get(), *arrays, what=str(chosen), **options)


@pytest.mark.parametrize("form", [FA3, FA3_TURNS, FA3_WIDE, FA3_TWO_SLOTS], ids=lambda f: f[:50])
@pytest.mark.parametrize("kind", PAIRS)
@exhaustive("fa3_wgmma", one_in=4)
def test_arrays_of_pairs_however_they_lie(rng: np.random.Generator, form: str, kind: str) -> None:
    """In chunks, and not so: every one is the same to the kernel."""
    variant = Variant.parse(form.format(score=""))
    d, dv = variant.head_dim, variant.head_dim_v
    shapes = (2, 8, 2, 13, 160), (1, 2, 1, 75, 333), (1, 1, 1, 140, 208)
    for (b, hq, hk, sq, sk), lie in itertools.product(shapes, LIES):
        arrays = random_inputs(rng, variant.dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
        host = pairs(rng, kind, (b, hq, sq, sk))
        there = LIES[lie](on_gpu, host)
        assert there.host.tobytes() == host.tobytes()
        argument = "bias" if "bias" in kind else "mask"
        options: dict[str, Any] = {"causal": variant.stages == 3, argument: there}
        given = [on_gpu(x) for x in arrays]
        plan: Any = cufa.explain(*given, **options)
        chosen = variant._replace(score=plan.variant.score)
        out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **options)
        what = f"{sk} keys, {lie}: {chosen}"
        options[argument] = host
        assert_accepted(out.get(), lse.get(), *arrays, what=what, **options)


@pytest.mark.parametrize("form", [form for form in ALL if form is not FA1], ids=lambda f: f[:50])
@exhaustive(one_in=2)
def test_dropout(rng: np.random.Generator, form: str) -> None:
    """The same weights whatever the tiles are; a seed of its own in each call."""
    plain = Variant.parse(form.format(score=""))
    d, dv = plain.head_dim, plain.head_dim_v
    for causal, seed in ((False, 3), (True, 2**64 - 2), (False, 2**40)):
        parts = "Causal, Dropout" if causal else "Dropout"
        variant = Variant.parse(form.format(score=parts))
        arrays = random_inputs(rng, variant.dtype, hq=2, hk=1, sq=150, sk=201, d=d, dv=dv)
        keep = cufa.dropout_mask((1, 2, 150, 201), 0.5, seed) / 0.5
        out, lse = called(variant, *arrays, dropout_p=0.5, seed=seed)
        assert_accepted(out, lse, *arrays, causal=causal, keep=keep)
    # Infinities are computed once more.
    if variant.dtype == "float32":
        q, k, v = arrays
        v[0, 0, 77] = np.inf
        out, _ = called(variant, q, k, v, dropout_p=0.5, seed=seed)
        kept = keep[0, :, :, 77] > 0
        assert np.isposinf(out[0][kept]).all()
        assert np.isfinite(out[0][~kept]).all()


@pytest.mark.parametrize("form", [form for form in ALL if form is not FA1], ids=lambda f: f[:50])
@pytest.mark.parametrize("name", score_mods.FEATURES)
@exhaustive(but=lambda form, name: form in ONE_OF_EACH or name == "all", one_in=3)
def test_own_functions(rng: np.random.Generator, form: str, name: str) -> None:
    variant = Variant.parse(form.format(score=""))
    d, dv = variant.head_dim, variant.head_dim_v
    for sizes in ((1, 2, 1, 201, 150), (2, 8, 2, 13, 250)):
        b, hq, hk, sq, sk = sizes
        arrays = random_inputs(rng, variant.dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
        options, there = score_mods.made(rng, name, sizes, on_gpu)
        given = [on_gpu(x) for x in arrays]
        plan: Any = cufa.explain(*given, **there)
        chosen = variant._replace(score=plan.variant.score)
        out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **there)
        assert_accepted(out.get(), lse.get(), *arrays, what=str(chosen), **options)


@pytest.mark.parametrize("form", [FP32, FP32_HALVES, MMA, MMA_ONE_STAGE])
@pytest.mark.parametrize("name", ["alibi", "sinks and window", "bias", "mask", "all"])
@exhaustive(but=lambda form, name: form in ONE_OF_EACH or name == "all", one_in=3)
def test_arrays_beside_no_keys(rng: np.random.Generator, form: str, name: str) -> None:
    """There is nothing to read."""
    sizes = b, hq, hk, sq, sk = (2, 2, 1, 70, 0)
    variant = Variant.parse(form.format(score=""))
    arrays = random_inputs(
        rng, variant.dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=variant.head_dim, dv=24
    )
    options = options_of(rng, name, sizes)
    given = [on_gpu(x) for x in arrays]
    there: dict[str, Any] = {k: on_gpu(x) if hasattr(x, "dtype") else x for k, x in options.items()}
    plan: Any = cufa.explain(*given, **there)
    chosen = variant._replace(score=plan.variant.score)
    out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **there)
    assert_accepted(out.get(), lse.get(), *arrays, what=str(chosen), **options)


@pytest.mark.parametrize("form", [FP32, FP32_HALVES, MMA, MMA_ONE_STAGE])
def test_own_functions_without_keys(rng: np.random.Generator, form: str) -> None:
    """Their arrays may be empty, too."""
    variant = Variant.parse(form.format(score=""))
    arrays = random_inputs(rng, variant.dtype, b=2, hq=2, sq=70, sk=0, d=variant.head_dim, dv=24)
    given = [on_gpu(x) for x in arrays]
    table: Any = on_gpu(np.empty((2, 0), np.float32))
    options: dict[str, Any] = {
        "score_mod": lambda s, b, h, q_idx, kv_idx: s + table[b, kv_idx],
        "mask_mod": lambda b, h, q_idx, kv_idx: table[b, kv_idx] > q_idx,
    }
    plan: Any = cufa.explain(*given, **options)
    chosen = variant._replace(score=plan.variant.score)
    out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **options)
    assert_accepted(out.get(), lse.get(), *arrays)


@pytest.mark.parametrize("form", [FA3, FA3_TURNS, FA3_WIDE, FA3_ONE_SLOT], ids=lambda f: f[:50])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@exhaustive(one_in=4)
def test_what_the_kernel_in_front_still_writes(
    emulated: Emulator, rng: np.random.Generator, form: str, causal: bool, seed: int
) -> None:
    """Nothing of it is read or written before; heads may have the same K, and V may be K."""
    variant = variant_of(form, causal)
    d, dv = variant.head_dim, variant.head_dim_v
    arrays = random_inputs(rng, variant.dtype, b=2, hq=4, hk=2, sq=70, sk=150, d=d, dv=dv)
    q, k, v = map(on_gpu, arrays)
    one = k.view_of(np.broadcast_to(k.host[:, :1], k.shape))
    emulated.seed = seed
    for keys, values in ((k, v), (one, v), (k, k), (one, one)):
        out, lse = cufa.attention(q, keys, values, causal=causal, kernel=variant, return_lse=True)
        host = arrays[0], keys.host, values.host
        assert_accepted(out.get(), lse.get(), *host, causal=causal)


@variants
@exhaustive(one_in=2)
def test_head_dims_that_are_padded(rng: np.random.Generator, form: str) -> None:
    variant = variant_of(form, True)
    d, dv = variant.head_dim - 7, variant.head_dim_v - 9
    checked(variant, *random_inputs(rng, variant.dtype, b=2, sq=40, sk=70, d=d, dv=dv))


@variants
@exhaustive(one_in=2)
def test_scores_that_grow_from_key_to_key(rng: np.random.Generator, form: str) -> None:
    """Keys come last to first: row maxima move again and again, by little and by much."""
    variant = variant_of(form, False)
    d, dv = variant.head_dim, variant.head_dim_v
    q, k, v = random_inputs(rng, variant.dtype, sq=60, sk=300, d=d, dv=dv)
    for power in (1, 3):
        growing = (k * np.linspace(4, 0, 300)[:, None] ** power).astype(k.dtype)
        checked(variant, q, growing, v)


@variants
@exhaustive(one_in=2)
def test_a_nan_key(rng: np.random.Generator, form: str) -> None:
    """All rows that see it are NaN, and no others."""
    variant = variant_of(form, True)
    d, dv = variant.head_dim, variant.head_dim_v
    q, k, v = random_inputs(rng, variant.dtype, sq=200, d=d, dv=dv)
    expected, _ = called(variant, q, k, v)
    k[..., 150, :] = np.nan
    out, lse = called(variant, q, k, v)
    assert np.isnan(out[..., 150:, :].astype(np.float32)).all()
    assert np.isnan(lse[..., 150:]).all()
    np.testing.assert_array_equal(out[..., :150, :], expected[..., :150, :])


@variants
@exhaustive(one_in=2)
def test_scores_at_the_low_end_of_float32(rng: np.random.Generator, form: str) -> None:
    """Such a row sees keys, too: NaN where scores cannot be told apart, and else right."""
    variant = variant_of(form, False)
    d, dv = variant.head_dim, variant.head_dim_v
    q, k, v = random_inputs(rng, variant.dtype, sq=20, sk=90, d=d, dv=dv)
    q[...], k[...] = 0, 0
    narrow = variant.dtype == "float16"
    q[..., 0], k[..., 0], scale = (6e4, -6e4, 5e18) if narrow else (1e15, -2e23, 1.0)
    out, _ = called(variant, q, k, v, scale=scale)
    if variant.dtype == "float32":
        mean = np.broadcast_to(v.mean(2, keepdims=True), out.shape)
        np.testing.assert_allclose(out, mean, 1e-5, 1e-6)
    else:
        assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 9])
@exhaustive("fa3_wgmma", but=lambda heads: heads % 2)
def test_tiles_for_two_blocks(emulated: Emulator, rng: np.random.Generator, heads: int) -> None:
    """Each block has two of up to six; it draws the others, and leaves none drawn."""
    variant = variant_of(FA3_WIDE, True)
    arrays = random_inputs(rng, variant.dtype, hq=heads, sq=20, sk=40, d=128)
    for emulated.last_first in (False, True):
        checked(variant, *arrays)


@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_sections_and_late_rows(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Sections of four and three heads, then the late tiles of all."""
    small = device.named("h200")._replace(sm_count=12, l2_bytes=1 << 19)
    monkeypatch.setattr(device, "of_id", lambda device_id: small)
    variant = variant_of(form, True)
    arrays = random_inputs(rng, variant.dtype, hq=7, sq=13 * variant.bm - 5, sk=150, d=64)
    problem = Problem.of_shapes(*(x.shape for x in arrays), dtype=variant.dtype, causal=True)
    order = scheduler.order(problem, variant, small)
    assert (order.section_heads, order.late_rows) == (4, 4)
    checked(variant, *arrays)


def test_heads_that_share_a_tile(rng: np.random.Generator) -> None:
    variant = variant_of(FA3, True)
    checked(variant, *random_inputs(rng, variant.dtype, b=2, hq=8, hk=2, sq=13, sk=150, d=64))


@pytest.mark.parametrize("form", [FP32, FP32_HALVES])
@pytest.mark.parametrize("causal", [False, True])
def test_infinities_of_float32(rng: np.random.Generator, form: str, causal: bool) -> None:
    variant = variant_of(form, causal)
    d, dv = variant.head_dim, variant.head_dim_v
    q, k, v = random_inputs(rng, "float32", sq=90, d=d, dv=dv)
    q[..., 0] = np.abs(q[..., 0]) + 0.1
    k[..., 3, 0] = k[..., 70, 0] = -np.inf
    v[..., 40, 1], v[..., 41, 2], v[..., 42, 3] = np.inf, -np.inf, 3.4028e38
    expected = cufa.attention(q, k, v, causal=causal)
    out, _ = called(variant, q, k, v)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
