"""BlockMask: the tiles of a mask, evaluated by NumPy and by a kernel on the host."""

from __future__ import annotations

import sys
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import score_mods
from emulated import Emulator, emulate, needs_compiler
from exhaustive import exhaustive
from played_gpu import Gpu, Stream, on_gpu
from reference import Expected, assert_accepted, lse_slack, random_inputs
from score_arrays import options_of

import cufa
from cufa import device
from cufa.cpu import block_mask as cpu
from cufa.specs.variant import Variant

MASKS = ("documents", "sliding window", "prefix")
SIZES = (2, 3, 1, 200, 333)


def tiles_of(mask_mod: Any, sizes: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Return the kinds of tiles, one by one."""
    seen = np.broadcast_to(mask_mod(*np.ix_(*map(np.arange, sizes))), sizes)
    rows, columns = (range(0, n, step) for n, step in zip(sizes[2:], block, strict=True))
    kinds = np.empty((*sizes[:2], len(rows), len(columns)), np.uint8)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            tile = seen[:, :, row : row + block[0], column : column + block[1]]
            kinds[:, :, i, j] = tile.any((2, 3)).astype(int) + tile.all((2, 3))
    return kinds


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator()


@pytest.fixture
def played_cupy(
    gpu: Gpu,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Any:
    """Play a GPU that runs the kernels' source, with two multiprocessors.

    Warps take turns at random, or in order: in each test always the same way.
    """
    two = device.named("h200")._replace(sm_count=2)
    monkeypatch.setattr(device, "of_id", lambda device_id: two)
    emulate(monkeypatch, emulator)
    emulator.seed = crc32(request.node.name.encode()) % 8
    return sys.modules["cupy"]


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (16, 80)])
@pytest.mark.parametrize("name", MASKS)
def test_kinds_on_the_cpu(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str, block: tuple[int, int]
) -> None:
    options, _ = score_mods.made(rng, name, SIZES, np.asarray)
    sizes = (2, 3, 200, 333)
    expected = tiles_of(options["mask_mod"], sizes, block)
    for pairs in (1 << 22, 1 << 12, 1):
        monkeypatch.setattr(cpu, "_PAIRS", pairs)
        found = cufa.BlockMask.of(options["mask_mod"], *sizes, block=block)
        assert found.kinds.dtype == np.uint8
        np.testing.assert_array_equal(found.kinds, expected)
    assert (found.block, found.seq_q, found.seq_kv) == (block, 200, 333)


@needs_compiler
@pytest.mark.parametrize("name", MASKS)
def test_kinds_by_the_kernel(played_cupy: Any, rng: np.random.Generator, name: str) -> None:
    options, there = score_mods.made(rng, name, SIZES, on_gpu)
    sizes, block = (2, 3, 200, 333), (64, 80)
    found = cufa.BlockMask.of(there["mask_mod"], *sizes, block=block, xp=played_cupy)
    np.testing.assert_array_equal(found.kinds.get(), tiles_of(options["mask_mod"], sizes, block))


#: With one slot of Q, two and three; one stage, and several heads a tile but for the mask.
FORMS = (
    "fa2_fp32<float, 64, 64, 64, 32, 2, 4, 2, Score<>, Dense>",
    "fa2_fp32<float, 32, 192, 32, 32, 1, 4, 1, Score<>, Dense>",
    "fa2_mma<bfloat16, 64, 64, 64, 64, 2, 4, 2, Score<>, Dense>",
    "fa2_mma<float16, 32, 96, 128, 32, 1, 4, 2, Score<>, Dense>",
    "fa3_wgmma<bfloat16, 64, 64, 64, 64, 3, 8, 3, false, Score<>, Dense>",
    "fa3_wgmma<float16, 64, 64, 192, 128, 3, 16, 1, true, Score<>, Dense>",
    "fa3_wgmma<bfloat16, 128, 128, 128, 128, 2, 12, 1, true, Score<>, Dense>",
    "fa3_wgmma<bfloat16, 192, 192, 128, 80, 2, 12, 1, false, Score<>, Dense>",
)


def checkered(arrays: Any) -> Any:
    """Hide most tiles of 64 x 32, and rows and columns of them."""
    steps = arrays["steps"]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row, column = q_idx // 64, kv_idx // 32
        return ((row * steps[h] + column + b) % 5 == 0) & (row != 1) & (column != 2)

    return {"mask_mod": mask_mod}


ONE_OF_EACH = FORMS[0], FORMS[2], FORMS[4]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.split(", Score")[0])


def called(variant: Variant, arrays: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the result and the log-sum-exp of a variant, with the parts that a call has."""
    given = [on_gpu(x) for x in arrays]
    plan: Any = cufa.explain(*given, **options)
    assert "Blocks" in plan.variant.score
    chosen = variant._replace(score=plan.variant.score)
    out, lse = cufa.attention(*given, kernel=chosen, return_lse=True, **options)
    return out.get(), lse.get()


@needs_compiler
@forms
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (100, 30), "score_mod": lambda s, b, h, i, j: s - 0.01 * abs(i - j)},
        {"softcap": 3.0, "causal": "top-left"},
    ],
    ids=["alone", "causal", "window and score_mod", "softcap and top-left"],
)
@exhaustive(but=lambda form, options: form in ONE_OF_EACH or "softcap" in options, one_in=3)
def test_tiles_that_are_left_out(
    played_cupy: Any, rng: np.random.Generator, form: str, options: dict[str, Any]
) -> None:
    variant = Variant.parse(form)
    d, dv = variant.head_dim, variant.head_dim_v
    for sizes, block in (((2, 2, 1, 300, 400), (64, 32)), ((1, 8, 2, 20, 390), (16, 80))):
        b, hq, hk, sq, sk = sizes
        arrays = random_inputs(rng, variant.dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
        steps = rng.integers(1, 4, hq)
        own, there = checkered({"steps": steps}), checkered({"steps": on_gpu(steps)})
        tiles = cufa.BlockMask.of(there["mask_mod"], b, hq, sq, sk, block=block, xp=played_cupy)
        out, lse = called(variant, arrays, block_mask=tiles, **there, **options)
        expected: dict[str, Any] = own | options
        assert_accepted(out, lse, *arrays, what=form, **expected)


@needs_compiler
@forms
@exhaustive(one_in=2)
def test_what_kinds_are_to_a_kernel(played_cupy: Any, rng: np.random.Generator, form: str) -> None:
    """Hidden tiles are not read, whole ones not masked, and rows may see none."""
    variant = Variant.parse(form)
    d, dv = variant.head_dim, variant.head_dim_v
    sq, sk, block = 2 * variant.bm, 4 * variant.bn, (variant.bm, variant.bn)
    q, k, v = random_inputs(rng, variant.dtype, b=1, hq=2, sq=sq, sk=sk, d=d, dv=dv)
    kinds = np.array([[[[0, 2, 1, 0], [2, 0, 0, 1]]], [[[0, 0, 0, 0], [0, 0, 0, 2]]]], np.uint8)
    kinds = kinds.reshape(1, 2, 2, 4)
    seen = kinds.repeat(block[0], 2).repeat(block[1], 3)
    seen = np.where(seen == 1, np.arange(sk) % 3 > 0, seen == 2)
    v[:, 1, : 3 * variant.bn] = np.nan
    there: Any = on_gpu(kinds[0])
    bm, bn = block

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (there[h, q_idx // bm, kv_idx // bn] > 0) & (kv_idx % 3 > 0)

    tiles = cufa.BlockMask(mask_mod, on_gpu(kinds), block, sq, sk)
    out, lse = called(variant, (q, k, v), block_mask=tiles, mask_mod=mask_mod)
    expected = np.where(np.isnan(v.astype(np.float32)), 0, v.astype(np.float32)).astype(v.dtype)
    assert_accepted(out, lse, q, k, expected, mask=seen, what=form)
    assert (lse[:, 1, : variant.bm] == -np.inf).all()


def late_starters(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hide the last keys of many queries, and in between some of all."""
    return ((kv_idx < 500) | (q_idx % 3 == h)) & ((kv_idx > 420) | (kv_idx < 330) | (q_idx < 70))


@needs_compiler
@forms
@pytest.mark.parametrize("name", ["alone", "causal", "alibi", "softcap", "score_mod"])
@exhaustive(but=lambda form, name: form in ONE_OF_EACH or name == "alibi", one_in=3)
def test_whole_tiles_after_tiles_in_part(
    played_cupy: Any, rng: np.random.Generator, form: str, name: str
) -> None:
    """Where rows have seen none before, or scores grow, and where both kinds take turns."""
    variant = Variant.parse(form)
    d, dv = variant.head_dim, variant.head_dim_v
    q, k, v = random_inputs(rng, variant.dtype, b=1, hq=2, sq=200, sk=700, d=d, dv=dv)
    k = (k.astype(np.float32) * np.linspace(9, 0, 700, dtype=np.float32)[:, None]).astype(k.dtype)
    by_name: dict[str, dict[str, Any]] = {
        "alone": {},
        "causal": {"causal": True},
        "alibi": {"alibi_slopes": np.array([0.02, 0.5], np.float32)},
        "softcap": {"softcap": 20.0},
        "score_mod": {"score_mod": lambda s, b, h, i, j: s + abs(i - 2 * j + 300) / 64},
    }
    options = by_name[name]
    there = {key: on_gpu(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    block = 64, 16
    tiles = cufa.BlockMask.of(late_starters, None, 2, 200, 700, block=block, xp=played_cupy)
    given = {"block_mask": tiles, "mask_mod": late_starters}
    out, lse = called(variant, (q, k, v), **given, **there)
    expected = Expected(q, k, v, mask_mod=late_starters, **options)
    score = ("Softcap",) if variant.dtype == "bfloat16" else ()
    expected.assert_accepts(out, lse, form, lse_slack=lse_slack(q, k, score=score, **options))


def halves(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Hide every other tile, of which a kernel's own are parts."""
    return (q_idx // 192 + kv_idx // 128 + h) % 2 == 0


some_forms = pytest.mark.parametrize(
    "form", [FORMS[i] for i in (0, 3, 4, 5, 7)], ids=lambda form: form.split(", Score")[0]
)


@needs_compiler
@some_forms
@pytest.mark.parametrize("name", ["all", "mask", "bits", "sinks and window", "bias of keys"])
@exhaustive(
    but=lambda form, name: form in (FORMS[0], FORMS[3], FORMS[4]) or name == "all", one_in=3
)
def test_beside_other_parts(
    played_cupy: Any, rng: np.random.Generator, form: str, name: str
) -> None:
    """Tiles that the function does not hide are not whole to other masks; weights are dropped."""
    variant = Variant.parse(form)
    sizes = 1, 4, 2, 250, 390
    b, hq, hk, sq, sk = sizes
    d, dv = variant.head_dim, variant.head_dim_v
    arrays = random_inputs(rng, variant.dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
    options = options_of(rng, name, sizes)
    there = {key: on_gpu(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    tiles = cufa.BlockMask.of(halves, None, hq, sq, sk, block=(64, 32), xp=played_cupy)
    given = {"mask_mod": halves, "block_mask": tiles, "dropout_p": 0.25, "seed": 7}
    out, lse = called(variant, arrays, **given, **there)
    keep = cufa.dropout_mask((b, hq, sq, sk), 0.25, 7) / 0.75
    assert_accepted(out, lse, *arrays, what=form, keep=keep, mask_mod=halves, **options)


@needs_compiler
@some_forms
@pytest.mark.parametrize("causal", [False, True])
@exhaustive(one_in=2)
def test_padded_batches(
    played_cupy: Any, rng: np.random.Generator, form: str, causal: bool
) -> None:
    """Keys that a sequence has not are not read, and its list of tiles stays as it is."""
    variant = Variant.parse(form)._replace(kv="Padded")
    d, dv = variant.head_dim, variant.head_dim_v
    lengths = np.array([390, 0, 1, 127, 128, 300], np.int32)
    q, k, v = random_inputs(rng, variant.dtype, b=6, hq=2, hk=1, sq=250, sk=390, d=d, dv=dv)
    for i, n in enumerate(lengths):
        k[i, :, n:], v[i, :, n:] = np.nan, np.nan
    tiles = cufa.BlockMask.of(halves, None, 2, 250, 390, block=(64, 32), xp=played_cupy)
    options: dict[str, Any] = {"mask_mod": halves, "causal": causal}
    given = {"lengths_k": on_gpu(lengths), "block_mask": tiles}
    out, lse = called(variant, (q, k, v), **options, **given)
    for i, n in enumerate(lengths):
        one, keys = slice(i, i + 1), slice(n)
        case = Expected(q[one], k[one, :, keys], v[one, :, keys], **options)
        case.assert_accepts(out[one], lse[one], f"{form} {n}")


# --- on the CPU ---


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (16, 80)])
@pytest.mark.parametrize("name", ["documents", "sliding window", "prefix", "all"])
def test_results_on_the_cpu(rng: np.random.Generator, name: str, block: tuple[int, int]) -> None:
    """They are those of the function alone, whatever the tiles are."""
    for b, hq, hk, sq, sk in ((2, 6, 3, 300, 700), (1, 2, 2, 1100, 600)):
        options, _ = score_mods.made(rng, name, (b, hq, hk, sq, sk), np.asarray)
        arrays = random_inputs(rng, "float32", b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=16)
        expected = cufa.attention(*arrays, return_lse=True, **options)
        for of_batch, of_heads in ((b, hq), (b, None)):
            tiles = cufa.BlockMask.of(options["mask_mod"], of_batch, of_heads, sq, sk, block=block)
            found = cufa.attention(*arrays, return_lse=True, block_mask=tiles, **options)
            for x, y in zip(found, expected, strict=True):
                np.testing.assert_allclose(x, y, 2e-5, 2e-6)


def test_padded_batches_on_the_cpu(rng: np.random.Generator) -> None:
    """Tiles are those of a sequence's own number, and of the keys that it has."""
    arrays = random_inputs(rng, "float32", b=3, hq=2, sq=300, sk=700, d=16)
    options, _ = score_mods.made(rng, "documents", (3, 2, 2, 300, 700), np.asarray)
    lengths = np.array([700, 130, 0])
    expected = cufa.attention(*arrays, lengths_k=lengths, **options)
    tiles = cufa.BlockMask.of(options["mask_mod"], 3, None, 300, 700, block=(64, 32))
    found = cufa.attention(*arrays, lengths_k=lengths, block_mask=tiles, **options)
    np.testing.assert_allclose(found, expected, 2e-5, 2e-6)


def test_tiles_that_are_known_are_not_asked_for(rng: np.random.Generator) -> None:
    """Nothing is read of hidden tiles, and whole ones are not masked."""
    arrays = random_inputs(rng, "float32", sq=512, sk=768, d=16)
    asked = []

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if isinstance(kv_idx, np.ndarray):  # not while it is traced
            asked.append(kv_idx.min())
        return (kv_idx >= 256) & (kv_idx < 600)

    tiles = cufa.BlockMask.of(mask_mod, None, None, 512, 768)
    asked.clear()
    arrays[2][:, :, :256] = np.nan
    out = cufa.attention(*arrays, mask_mod=mask_mod, block_mask=tiles)
    assert asked == [512]
    q, k, v = arrays
    expected = cufa.attention(q, k[:, :, 256:600], v[:, :, 256:600])
    np.testing.assert_allclose(out, expected, 1e-5, 1e-6)


# --- what may be asked for ---


def within(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx // 50 == kv_idx // 50


def seen_by_all(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return True


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((1, 1, -1, 5), {}, ValueError, "seq_q must be 0 to"),
        ((1, 1, 5, 2.0), {}, TypeError, "seq_kv must be an integer"),
        ((-1, 1, 5, 5), {}, ValueError, "batch must be 0 to"),
        ((1, True, 5, 5), {}, TypeError, "heads must be an integer"),
        ((1, 1, 5, 5), {"block": 128}, TypeError, r"block must be a tuple \(queries, keys\)"),
        ((1, 1, 5, 5), {"block": (128, 15)}, ValueError, "block must be 16 to 1024, not 15"),
        ((1, 1, 5, 5), {"block": (128, 1025)}, ValueError, "block must be 16 to 1024, not 1025"),
        ((1, 1, 5, 5), {"xp": "numpy"}, TypeError, "xp must be the module"),
        ((2**20, 2**10, 2**10, 2**10), {"block": (16, 16)}, ValueError, "block .* tiles"),
    ],
    ids=str,
)
def test_bad_arguments(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cufa.BlockMask.of(within, *arguments, **options)


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.uint64])
def test_sizes_that_are_integers_of_numpy(kind: Any) -> None:
    block = kind(16), kind(48)
    found = cufa.BlockMask.of(within, None, None, kind(100), kind(120), block=block)
    expected = cufa.BlockMask.of(within, None, None, 100, 120, block=(16, 48))
    assert found.key == expected.key
    np.testing.assert_array_equal(found.kinds, expected.kinds)


@pytest.mark.parametrize("sizes", [(0, 1, 5, 7), (2, 0, 5, 7), (2, 1, 0, 7), (2, 1, 5, 0)])
def test_nothing_to_look_at(sizes: tuple[int, ...]) -> None:
    b, h, sq, sk = sizes
    tiles = cufa.BlockMask.of(within, *sizes)
    assert tiles.kinds.size == 0
    assert repr(tiles).endswith("tiles of 128 x 128: none")
    q, k = np.ones((b, h, sq, 8), np.float32), np.ones((b, h, sk, 8), np.float32)
    out, lse = cufa.attention(q, k, k, block_mask=tiles, return_lse=True)
    assert out.shape == q.shape
    assert not out.any()
    assert np.isneginf(lse).all()


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nothing_to_look_at_on_a_gpu(
    played_cupy: Any, rng: np.random.Generator, dtype: str
) -> None:
    """Calls with keys, of the same arguments otherwise, come before and after; with a bias, too."""
    for keys in (0, 70, 0):
        q, k, v = random_inputs(rng, dtype, b=2, hq=2, sq=30, sk=keys, d=64)
        bias = np.ones((2, 2, 30, keys), np.float32)
        tiles = cufa.BlockMask.of(halves, 2, 2, 30, keys, xp=played_cupy)
        either: tuple[dict[str, Any], ...] = {}, {"bias": bias}
        for options in either:
            there: dict[str, Any] = {name: on_gpu(x) for name, x in options.items()}
            given = (on_gpu(x) for x in (q, k, v))
            out, lse = cufa.attention(*given, block_mask=tiles, return_lse=True, **there)
            assert_accepted(out.get(), lse.get(), q, k, v, mask_mod=halves, **options)
    for b, h, sq in ((0, 2, 30), (2, 0, 30), (2, 2, 0)):
        tiles = cufa.BlockMask.of(halves, b, h, sq, 70, xp=played_cupy)
        rows, columns = (on_gpu(np.ones((b, h, n, 64), dtype)) for n in (sq, 70))
        out = cufa.attention(rows, columns, columns, block_mask=tiles)
        assert out.shape == (b, h, sq, 64)


def test_bad_functions() -> None:
    with pytest.raises(TypeError, match="mask_mod must be a function"):
        cufa.BlockMask.of(np.tanh, 1, 1, 5, 5)
    with pytest.raises(ValueError, match="mask_mod must be a function for NumPy arrays"):
        cufa.BlockMask.of("true", 1, 1, 5, 5)
    with pytest.raises(TypeError, match="mask_mod cannot be traced: it returns what is int:"):
        cufa.BlockMask.of(lambda b, h, i, j: i + j, 1, 1, 5, 5)


@pytest.mark.parametrize("there", [False, True])
def test_there_must_be_a_function(played_cupy: Any, there: bool) -> None:
    with pytest.raises(TypeError, match=r"mask_mod must be a function .*, not None"):
        cufa.BlockMask.of(None, 1, 1, 5, 5, xp=played_cupy if there else np)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (
            lambda b, h, q_idx, kv_idx: q_idx >= kv_idx * h,
            "heads is None, but mask_mod depends on h",
        ),
        (lambda b, h, q_idx, kv_idx: b == 0, "batch is None, but mask_mod depends on b"),
        ("q_idx >= kv_idx * (b + 1)", "batch is None, but mask_mod depends on b"),
    ],
    ids=["h", "b", "text"],
)
def test_axes_that_a_mask_depends_on(played_cupy: Any, mask_mod: Any, message: str) -> None:
    xp: Any = played_cupy if isinstance(mask_mod, str) else np
    with pytest.raises(ValueError, match=message):
        cufa.BlockMask.of(mask_mod, None, None, 40, 50, xp=xp)
    assert cufa.BlockMask.of(mask_mod, 2, 3, 40, 50, xp=xp).kinds.shape[:2] == (2, 3)


@pytest.mark.parametrize("there", [False, True], ids=["numpy", "cupy"])
def test_one_sequence_or_head_is_not_all(
    played_cupy: Any, rng: np.random.Generator, there: bool
) -> None:
    """Where the mask differs from one to the other."""
    xp: Any = played_cupy if there else np
    made: Any = on_gpu if there else np.asarray
    q, k, v = map(made, random_inputs(rng, "float32", b=2, hq=4, sq=40, sk=50, d=64))
    masks: Any = (
        ("batch=1, and its mask_mod depends on b, .* has 2: make", lambda b, h, i, j: i >= j * b),
        ("heads=1, and its mask_mod depends on h, .* has 4: make", lambda b, h, i, j: i >= j * h),
    )
    for message, mask_mod in masks:
        tiles = cufa.BlockMask.of(mask_mod, 1, 1, 40, 50, xp=xp)
        for function in (cufa.attention, cufa.explain):
            for _ in range(2):
                with pytest.raises(ValueError, match=f"^block_mask was made with {message}"):
                    function(q, k, v, block_mask=tiles)
    same = cufa.BlockMask.of(lambda b, h, i, j: i >= j, 1, 1, 40, 50, xp=xp)
    assert cufa.attention(q, k, v, block_mask=same).shape == (2, 4, 40, 64)


@pytest.mark.parametrize("as_text", [False, True], ids=["function", "text"])
def test_one_sequence_or_head_is_not_all_after_a_call_that_may_be(gpu: Gpu, as_text: bool) -> None:
    mask_mod: Any = "q_idx >= kv_idx + b + h" if as_text else lambda b, h, i, j: i >= j + b + h
    kinds = on_gpu(np.ones((1, 1, 2, 2), np.uint8))
    tiles = cufa.BlockMask(mask_mod, kinds, (128, 128), 256, 256)

    def call(b: int, h: int) -> None:
        q = on_gpu(np.zeros((b, h, 256, 64), np.float16))
        cufa.attention(q, q, q, block_mask=tiles)

    call(1, 1)
    launches = len(gpu.launches)
    for b, h, message in ((2, 2, "batch=1"), (2, 1, "batch=1"), (1, 3, "heads=1")):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^block_mask was made with {message}, and its"):
                call(b, h)
    assert len(gpu.launches) == launches


def test_a_call_does_not_trace_the_mask_again(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = random_inputs(rng, "float32", b=2, hq=4, sq=40, sk=50, d=8)
    tiles = cufa.BlockMask.of(within, 1, 1, 40, 50)
    monkeypatch.delattr("cufa.api.block_mask.indices_read")
    assert cufa.attention(q, k, v, block_mask=tiles).shape == (2, 4, 40, 8)


def test_what_is_printed() -> None:
    tiles = cufa.BlockMask.of(within, 2, None, 100, 150, block=(50, 20))
    parts = "62.5% hidden, 12.5% in part, 25.0% whole"
    assert repr(tiles) == f"BlockMask of 2 x 1 x 100 x 150 in tiles of 50 x 20: {parts}"


@pytest.mark.parametrize("there", [False, True], ids=["numpy", "cupy"])
def test_calls_that_it_is_not_for(played_cupy: Any, rng: np.random.Generator, there: bool) -> None:
    xp: Any = played_cupy if there else np
    made: Any = on_gpu if there else np.asarray
    q, k, v = map(made, random_inputs(rng, "float32", b=2, hq=4, sq=100, sk=150, d=8))
    tiles = cufa.BlockMask.of(within, 2, 4, 100, 150, xp=xp)
    other = cufa.BlockMask.of(within, 2, 4, 100, 150, xp=np if there else played_cupy)
    cases: Any = (
        (
            {"mask_mod": lambda b, h, i, j: i == j, "block_mask": tiles},
            ValueError,
            "mask_mod .* is",
        ),
        ({"mask_mod": within, "block_mask": tiles.kinds}, TypeError, "block_mask must be a BlockM"),
        ({"mask_mod": within, "block_mask": other}, TypeError, "block_mask must be of .* arrays"),
    )
    sizes = {"sequences": (3, 4, 100, 150), "heads": (2, 2, 100, 150)}
    sizes |= {"queries": (2, 4, 101, 150), "keys": (2, 4, 100, 149)}
    for what, of in sizes.items():
        unlike = cufa.BlockMask.of(within, *of, xp=xp)
        message = rf"block_mask has \d+ {what}, but the call has \d+"
        cases += (({"mask_mod": within, "block_mask": unlike}, ValueError, message),)
    for options, error, message in cases:
        for function in (cufa.attention, cufa.explain):
            for _ in range(2):
                with pytest.raises(error, match=message):
                    function(q, k, v, **options)


# --- calls that come again ---


def test_another_function_after_one_that_hides_nothing(
    played_cupy: Any, gpu: Gpu, rng: np.random.Generator
) -> None:
    q, k, v = map(on_gpu, random_inputs(rng, "float16", sq=100, sk=150, d=64))
    tiles = cufa.BlockMask.of(seen_by_all, None, None, 100, 150, xp=played_cupy)
    cufa.attention(q, k, v, mask_mod=seen_by_all, block_mask=tiles)
    with pytest.raises(ValueError, match=r"^mask_mod .* is not that of block_mask"):
        cufa.attention(q, k, v, mask_mod=within, block_mask=tiles)


def test_tiles_bring_their_function(rng: np.random.Generator) -> None:
    q, k, v = random_inputs(rng, "float32", b=2, hq=4, sq=100, sk=150, d=8)
    tiles = cufa.BlockMask.of(within, None, None, 100, 150)
    both = cufa.attention(q, k, v, mask_mod=within, block_mask=tiles)
    assert (cufa.attention(q, k, v, block_mask=tiles) == both).all()
    assert (cufa.attention(q, k, v, mask_mod=within) == both).all()
    assert cufa.explain(q, k, v, block_mask=tiles) == cufa.explain(q, k, v, mask_mod=within)


@needs_compiler
def test_lists_are_made_once(played_cupy: Any, gpu: Gpu, rng: np.random.Generator) -> None:
    """For each tile and stream; what fits no more is refused, however often it comes."""
    arrays = [on_gpu(x) for x in random_inputs(rng, "bfloat16", hq=2, sq=130, sk=260, d=64)]
    tiles = cufa.BlockMask.of(within, 1, None, 130, 260, xp=played_cupy)
    expected = cufa.attention(*arrays, mask_mod=within, block_mask=tiles).get()
    for stream in (gpu.stream, gpu.stream, Stream(ptr=5)):
        gpu.stream = stream
        out = cufa.attention(*arrays, mask_mod=within, block_mask=tiles)
        np.testing.assert_array_equal(out.get(), expected)
    assert len(tiles._lists) == 2
    assert gpu.parsed == 1
    shorter = [arrays[0], arrays[1][:, :, :250], arrays[2][:, :, :250]]
    for _ in range(2):
        with pytest.raises(ValueError, match="block_mask has 260 keys, but the call has 250"):
            cufa.attention(*shorter, mask_mod=within, block_mask=tiles)


@needs_compiler
def test_captures_find_the_lists(played_cupy: Any, gpu: Gpu, rng: np.random.Generator) -> None:
    arrays = [on_gpu(x) for x in random_inputs(rng, "bfloat16", hq=2, sq=130, sk=260, d=64)]
    tiles = cufa.BlockMask.of(within, None, 2, 130, 260, xp=played_cupy)
    for capturing in (True, False, True):
        gpu.stream.capturing = capturing
        if capturing and not tiles._lists:
            with pytest.raises(ValueError, match=r"block_mask needs memory .* captured"):
                cufa.attention(*arrays, mask_mod=within, block_mask=tiles)
        else:
            cufa.attention(*arrays, mask_mod=within, block_mask=tiles)


def test_a_mask_that_hides_nothing_needs_no_tiles(
    played_cupy: Any, gpu: Gpu, rng: np.random.Generator
) -> None:
    arrays = [on_gpu(x) for x in random_inputs(rng, "bfloat16", hq=2, sq=130, sk=260, d=64)]
    tiles = cufa.BlockMask.of(seen_by_all, None, None, 130, 260, xp=played_cupy)
    assert (tiles.kinds.get() == 2).all()
    plan: Any = cufa.explain(*arrays, block_mask=tiles)
    assert plan.variant.score == ()


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel_runs_here")
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("fa2_fp32", "float32"), ("fa2_mma", "float16"), ("fa3_wgmma", "bfloat16")],
)
@pytest.mark.parametrize("name", [*MASKS, "all"])
def test_on_the_gpu(
    cupy: Any, rng: np.random.Generator, kernel: str, dtype: str, name: str
) -> None:
    for b, hq, hk, sq, sk in ((2, 4, 2, 131, 257), (1, 6, 1, 1000, 1900), (2, 8, 2, 21, 400)):
        for d in (64, 128, 192):
            arrays = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d)
            options, there = score_mods.made(rng, name, (b, hq, hk, sq, sk), cupy.asarray)
            given = [cupy.asarray(x) for x in arrays]
            for block in ((128, 128), (64, 32)):
                tiles = cufa.BlockMask.of(there["mask_mod"], b, hq, sq, sk, block=block, xp=cupy)
                expected = tiles_of(options["mask_mod"], (b, hq, sq, sk), block)
                np.testing.assert_array_equal(tiles.kinds.get(), expected)
                out, lse = cufa.attention(
                    *given, kernel=kernel, return_lse=True, block_mask=tiles, **there
                )
                assert_accepted(out, lse, *arrays, what=f"{sq} {sk} {d} {block}", **options)
