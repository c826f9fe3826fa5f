"""decode.cu on the host, from `cufa.decode` on: all ways in which sequences can be cut and lie."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulated import Emulator, emulate, needs_compiler
from exhaustive import exhaustive
from played_gpu import Array, Gpu, Stream, on_gpu
from reference import random_inputs
from score_arrays import DECODE_FEATURES, options_of
from test_decode import assert_each_accepted, firsts_of, in_pages, poisoned
from test_emulated import emulator  # noqa: F401

import cufa
from cufa import device
from cufa.launch import scratch
from cufa.planner import decode_model
from cufa.planner.decode import DecodePlan
from cufa.planner.decode_model import Items

pytestmark = needs_compiler

#: Options that the oracle is to know.
SCORE = ("scale", "window", "attention_chunk", "softcap", "alibi_slopes", "sinks")


@pytest.fixture(autouse=True)
def emulated(gpu: Gpu, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:  # noqa: F811
    """Play a GPU with thirteen multiprocessors, on which few short units are cut, too."""
    monkeypatch.setattr(Items, "are_whole", lambda items, element_bytes: items.of_each > 4)
    few = device.named("h200")._replace(sm_count=13)
    monkeypatch.setattr(device, "of_id", lambda device_id: few)
    emulate(monkeypatch, emulator)
    emulator.last_first = False  # a block waits for those before it
    emulator.stale = emulator.seed = 0
    return emulator


@pytest.fixture(params=[False, True], ids=["as planned", "equal shares"])
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut units as planned; or by equal shares of all keys, if equal parts take any longer.

    The keys here are so few that equal parts of a unit would always do otherwise, and many units
    would never be cut.
    """
    if request.param:
        monkeypatch.setattr(Items, "are_whole", lambda items, element_bytes: False)
        for price in ("_END", "_NUMBER", "_WAIT"):
            monkeypatch.setattr(decode_model, price, 0)


def one_look(stale: int, shares: bool) -> bool:
    """Whether this is the one look at lengths with which a way to cut units always runs."""
    return stale == int(shares)


def in_turn(all_options: list[dict[str, Any]]) -> Callable[..., bool]:
    """Return what says whether options are those with which this way to cut units always runs."""

    def chosen(stale: int, shares: bool, options: dict[str, Any]) -> bool:
        return one_look(stale, shares) and all_options.index(options) % 2 == int(shares)

    return chosen


both_shares = pytest.mark.usefixtures("shares")


def checked(
    rng: np.random.Generator,
    lengths: Any,
    *,
    hq: int = 8,
    hk: int = 2,
    sq: int = 1,
    d: int = 64,
    dv: int = 64,
    page_size: int = 0,
    causal: bool = True,
    dtype: str = "bfloat16",
    **options: Any,
) -> np.ndarray:
    """Decode sequences of these lengths, accept the results, and return them."""
    b, capacity = len(lengths), max(lengths)
    q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=capacity, d=d, dv=dv)
    caches: dict[str, Any] = {"lengths": np.array(lengths, np.int32)}
    firsts = firsts_of(lengths, sq, options)
    if page_size:
        k_cache, caches["block_table"] = in_pages(rng, k, lengths, page_size, firsts)
        v_cache = np.full((*k_cache.shape[:3], dv), np.nan, v.dtype)
        for i, length in enumerate(lengths):
            for n in range(firsts[i], length):
                page = caches["block_table"][i, n // page_size]
                v_cache[page, :, n % page_size] = v[i, :, n]
    else:
        k_cache, v_cache = (poisoned(x, lengths, firsts) for x in (k, v))
    score = {name: options[name] for name in SCORE if name in options}
    given: dict[str, Any] = {
        n: on_gpu(x) if isinstance(x, np.ndarray) else x for n, x in options.items()
    }
    given |= {name: on_gpu(x) for name, x in caches.items()}
    arrays = [on_gpu(x) for x in (q, k_cache, v_cache)]
    out, lse = cufa.decode(*arrays, causal=causal, return_lse=True, **given)
    assert_each_accepted(out.get(), lse.get(), q, k, v, lengths, causal=causal, **score)
    return np.asarray(out.get())


@pytest.mark.parametrize("page_size", [0, 16, 100])
@pytest.mark.parametrize(
    ("sequences", "d", "keys", "shape"),
    [
        *((3, 128, 350, (4, 2)), (6, 128, 350, (4, 2)), (24, 128, 150, (4, 4))),
        *((4, 64, 350, (4, 2)), (6, 64, 350, (4, 2)), (18, 64, 80, (2, 8))),
        *((4, 96, 350, (4, 2)), (1, 32, 350, (12, 1))),
    ],
)
@exhaustive("decode", one_in=3)
def test_whole_units(
    emulated: Emulator,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    sequences: int,
    d: int,
    keys: int,
    shape: tuple[int, int],
    page_size: int,
) -> None:
    """In blocks of `warps`, with registers for them on each of three multiprocessors."""
    few = device.named("h200")._replace(sm_count=3)
    monkeypatch.setattr(device, "of_id", lambda device_id: few)
    lengths = [keys, 0, 1, *rng.integers(1, keys, 30)][:sequences]
    for stale in (0, 1):
        emulated.stale = stale
        checked(rng, lengths, d=d, dv=d, page_size=page_size)
    assert shape in {(variant.warps, variant.blocks_per_sm) for variant in emulated.variants}


@both_shares
@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize(
    "lengths", [[300], [0, 500, 77], [1, 3, 97, 0, 299], [500] * 3, [7] * 20], ids=str
)
@exhaustive("decode", but=one_look)
def test_lengths(
    emulated: Emulator, rng: np.random.Generator, lengths: list[int], stale: int
) -> None:
    """Also if they change while the kernel in front still runs."""
    emulated.stale = stale
    checked(rng, lengths)
    checked(rng, lengths, num_splits=3)
    if stale:
        checked(rng, lengths, page_size=32)


@both_shares
@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize("longest", [90, 500])
@exhaustive("decode", but=one_look)
def test_more_units_than_run_at_once(
    emulated: Emulator, rng: np.random.Generator, longest: int, stale: int
) -> None:
    """A block has a whole unit, whatever the lengths are, if none is far longer than the others."""
    emulated.stale = stale
    lengths = [int(n) for n in rng.integers(0, 90, 40)]
    checked(rng, [*lengths, longest])
    checked(rng, [*lengths[:20], longest])


@pytest.mark.parametrize(("hq", "hk", "sq"), [(4, 1, 1), (14, 2, 2), (71, 1, 1), (8, 8, 3)])
def test_rows_of_a_group(
    emulated: Emulator, rng: np.random.Generator, hq: int, hk: int, sq: int
) -> None:
    checked(rng, [150, 2], hq=hq, hk=hk, sq=sq)


@both_shares
@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize(("sq", "bm"), [(5, 32), (8, 32)])
@exhaustive("decode", but=one_look)
def test_rows_that_two_warps_share(
    emulated: Emulator, rng: np.random.Generator, sq: int, bm: int, stale: int
) -> None:
    emulated.stale = stale
    checked(rng, [150, 2, 400, 33], sq=sq)
    checked(rng, [150, 20], sq=sq, page_size=7, num_splits=2)
    assert {v.bm for v in emulated.variants} & {bm}


ROWS_OF_A_WARPGROUP: list[dict[str, Any]] = [
    {"hq": 8, "sq": 16},
    {"hq": 71, "hk": 1},
    {"sq": 9, "d": 128, "dv": 128},
    {"sq": 16, "page_size": 64},
    {"sq": 16, "page_size": 48},
    {"sq": 16, "page_size": 7},
    {"hq": 20, "sq": 6, "d": 96, "dv": 32, "num_splits": 3},
    {"hq": 40, "hk": 1, "d": 256, "dv": 256},
    {"hq": 40, "hk": 1, "d": 192, "dv": 192},
    {"sq": 9, "d": 96, "dv": 96, "page_size": 7},
    {"sq": 16, "d": 32, "dv": 32, "page_size": 7},
    *({"sq": 16, "d": 256, "dv": n, "page_size": 16} for n in (32, 96)),
]


@both_shares
@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize("options", ROWS_OF_A_WARPGROUP, ids=str)
@exhaustive("decode", but=in_turn(ROWS_OF_A_WARPGROUP))
def test_rows_that_a_warpgroup_shares(
    emulated: Emulator, rng: np.random.Generator, options: dict[str, Any], stale: int
) -> None:
    emulated.stale = stale
    checked(rng, [150, 2, 400, 33], **options)
    checked(rng, [700], **options)
    assert {v.kernel for v in emulated.variants} & {"decode_wgmma"}


@pytest.mark.parametrize("stale", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        *({"d": n, "dv": n} for n in (32, 96, 128, 256)),
        *({"sq": 5}, {"sq": 9, "d": 128, "dv": 128}, {"hq": 71, "hk": 1, "d": 96, "dv": 96}),
        {"hq": 40, "hk": 1, "d": 192, "dv": 192, "page_size": 16},
        {"dtype": "float32", "d": 128, "dv": 256},
    ],
    ids=str,
)
@exhaustive(
    "decode", but=lambda stale, options: stale == ("sq" in options or "page_size" in options)
)
def test_units_in_few_pieces(
    emulated: Emulator, rng: np.random.Generator, options: dict[str, Any], stale: int
) -> None:
    """Which are merged in ways of their own, of two and of more."""
    emulated.stale = stale
    for splits in (2, 3, 4):
        checked(rng, [500, 33, 0, 150], num_splits=splits, **options)


@pytest.mark.parametrize("dv", [1, 32, 37, 38, 63, 96, 128, 129, 256])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("sq", [1, 5, 9])
@exhaustive(
    "decode",
    but=lambda dv, splits, sq: (dv + splits) % 3 == 0 and (dv // 32 + sq // 4) % 3 == 0,
)
def test_rows_of_a_result_that_lie_anywhere(
    emulated: Emulator, rng: np.random.Generator, dv: int, splits: int, sq: int
) -> None:
    """By a warp, two, and a warpgroup: memory next to a row, or behind the last, stays as it is."""
    sizes = {"b": 2, "hq": 8, "hk": 2, "sq": sq, "sk": 90, "d": 64, "dv": dv}
    arrays = [on_gpu(x) for x in random_inputs(rng, "bfloat16", **sizes)]
    checked(rng, [90, 70], num_splits=splits, sq=sq, dv=dv)
    result = cufa.decode(*arrays, num_splits=splits).get()
    for before, behind in ((1, 1), (0, 44 - dv % 44), (4, 4)):
        out = on_gpu(np.full((2, 8, sq, before + dv + behind), 7, arrays[0].dtype))
        cufa.decode(*arrays, num_splits=splits, out=out[..., before : before + dv])
        np.testing.assert_array_equal(out.get()[..., before : before + dv], result)
        assert (out.get()[..., :before] == 7).all()
        assert (out.get()[..., before + dv :] == 7).all()


@pytest.mark.parametrize("options", [{}, {"d": 128, "dv": 128}, {"page_size": 48}], ids=str)
def test_whole_units_of_four_warpgroups(
    emulated: Emulator, rng: np.random.Generator, options: dict[str, Any]
) -> None:
    """A block each; and if they differ in length, what is cut nevertheless."""
    for lengths in ([150] * 13, [700] + [20] * 12):
        checked(rng, lengths, hq=4, hk=1, sq=10, **options)
    assert {v.warps for v in emulated.variants} & {16}


@both_shares
@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize(
    "lengths", [[100] * 40, list(range(0, 200, 5)), [20] * 39 + [900], [50] * 100], ids=str
)
@exhaustive("decode", but=one_look)
def test_many_sequences(
    emulated: Emulator, rng: np.random.Generator, lengths: list[int], stale: int
) -> None:
    """A block does not look up all lengths before it asks for keys."""
    emulated.stale = stale
    checked(rng, lengths)
    checked(rng, lengths, page_size=16, num_splits=2)
    checked(rng, lengths, hq=16, hk=1, sq=2, page_size=16)


@pytest.mark.parametrize("page_size", [0, 1])
def test_lengths_that_change_between_two_looks(
    emulated: Emulator, rng: np.random.Generator, page_size: int
) -> None:
    emulated.stale = 3
    for lengths in ([400] + [1] * 19, [1] * 19 + [400]):
        checked(rng, lengths, hq=4, hk=1, page_size=page_size)


def test_warps_that_see_other_lengths(
    emulated: Emulator, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.stale = 4
    for sm_count, length in ((60, 500), (100, 700), (132, 300)):
        gpu = device.named("h200")._replace(sm_count=sm_count)
        monkeypatch.setattr(device, "of_id", lambda device_id, gpu=gpu: gpu)
        checked(rng, [length] * 40, hq=4, hk=1)
        checked(rng, [length] * 7, hq=4, hk=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_pages(emulated: Emulator, rng: np.random.Generator, page_size: int, dtype: str) -> None:
    checked(rng, [0, 100, 77], page_size=page_size, dtype=dtype)


def test_float32(emulated: Emulator, rng: np.random.Generator) -> None:
    checked(rng, [0, 500, 77], dtype="float32")
    checked(rng, [150, 2], hq=14, sq=2, dtype="float32", d=96, dv=40)
    checked(rng, [150, 2], hq=71, hk=1, dtype="float32", num_splits=3)
    checked(rng, [70, 2], hq=5, hk=1, sq=3, dtype="float32", d=160, dv=160)  # two warps a block


@pytest.mark.parametrize(("d", "dv"), [(40, 72), (128, 128), (256, 64)])
def test_head_dims(emulated: Emulator, rng: np.random.Generator, d: int, dv: int) -> None:
    checked(rng, [100, 50], d=d, dv=dv, dtype="float16", causal=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_causal_hides(emulated: Emulator, rng: np.random.Generator, dtype: str) -> None:
    """Hidden keys may be anything; NaN of values spreads, but not to queries that see no key."""
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, hk=1, sq=4, sk=100, d=64)
    lengths = np.array([100, 2], np.int32)

    def decoded(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        arrays = (on_gpu(x) for x in (q, k, v))
        out, lse = cufa.decode(*arrays, lengths=on_gpu(lengths), return_lse=True)
        return out.get().astype(np.float32), lse.get()

    expected, expected_lse = decoded(k, v)
    for bad in (np.nan, np.inf, -np.inf):
        keys, values = k.copy(), v.copy()
        for i, length in enumerate(lengths):
            keys[i, :, length - 1] = values[i, :, length - 1] = bad  # the last query alone sees it
        out, lse = decoded(keys, v)
        np.testing.assert_array_equal(out[:, :, :3], expected[:, :, :3])
        np.testing.assert_array_equal(lse[:, :, :3], expected_lse[:, :, :3])
        out, lse = decoded(k, values)
        np.testing.assert_array_equal(lse, expected_lse)
        assert np.isnan(out[0, :, :3]).all()
        assert not out[1, :, :2].any()
        assert np.isnan(out[1, :, 2]).all()
        on_cpu = cufa.decode(q, k, values, lengths=lengths).astype(np.float32)
        assert np.isfinite(on_cpu[:, :, :3]).all()
        assert not np.isfinite(on_cpu[:, :, 3]).any()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_cache_of_odd_head_dims_is_not_copied(
    gpu: Gpu, rng: np.random.Generator, layout: str, paged: bool
) -> None:
    import cupy  # the played one

    sizes: dict[str, Any] = {"head_dim_v": 37, "dtype": "bfloat16", "layout": layout, "xp": cupy}
    if paged:
        cache: Any = cufa.PagedKVCache(9, 16, 2, 2, 59, pages_per_sequence=4, **sizes)
        cache.allocate(), cache.allocate()
    else:
        cache = cufa.KVCache(2, 2, 64, 59, **sizes)
    cache.extend([50, 17])
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=4, hk=2, sq=3, sk=64, d=59, dv=37)
    cache._store.written[0] = 50, 17  # in place of `write`, whose kernel is not emulated here
    for array, values in zip(cache.layer(), (k, v), strict=True):
        there = array if layout == "bhsd" else array.swapaxes(1, 2)
        there.host[...] = np.nan
        for i, n in enumerate((50, 17)):
            for at in range(n):
                block, slot = (cache.block_table.host[i, at // 16], at % 16) if paged else (i, at)
                there.host[block, :, slot] = values[i, :, at]
    given = on_gpu(q if layout == "bhsd" else q.swapaxes(1, 2))
    gpu.allocated.clear()
    out, lse = cache.decode(given, return_lse=True)
    assert max(np.prod(shape) for shape in gpu.allocated[:-1]) <= 2 * 4 * 3 * 64
    out = out.get() if layout == "bhsd" else out.get().swapaxes(1, 2)
    assert_each_accepted(out, lse.get(), q, k, v, (50, 17), causal=True)


@pytest.mark.parametrize("unused", [-1, 2**31 - 1])
def test_a_table_on_the_host_with_lengths_on_the_device(
    emulated: Emulator, rng: np.random.Generator, unused: int
) -> None:
    """Entries of pages that are not in use are not read."""
    lengths = (40, 17)
    q, k, v = random_inputs(rng, "float16", b=2, hq=4, hk=2, sq=1, sk=64, d=64)
    seed = int(rng.integers(1 << 30))
    (k_pages, table), (v_pages, _) = (
        in_pages(np.random.default_rng(seed), x, lengths, 16) for x in (k, v)
    )
    table = np.where(table < 0, unused, table)
    arrays = (on_gpu(x) for x in (q, k_pages, v_pages))
    there = on_gpu(np.array(lengths, np.int32))
    out, lse = cufa.decode(*arrays, lengths=there, block_table=table, return_lse=True)
    assert_each_accepted(out.get(), lse.get(), q, k, v, lengths, causal=True)


@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize(
    "sizes",
    [
        {"hq": 8, "hk": 2, "sq": 1},
        {"hq": 6, "hk": 2, "sq": 3, "page_size": 7},
        {"hq": 14, "hk": 1, "sq": 2, "page_size": 16, "num_splits": 3},
        {"hq": 20, "hk": 2, "sq": 5, "dtype": "float16", "page_size": 48},
        {"hq": 4, "hk": 2, "sq": 2, "dtype": "float32", "page_size": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", DECODE_FEATURES)
@exhaustive("decode", one_in=6)
def test_scores(
    emulated: Emulator, rng: np.random.Generator, name: str, sizes: dict[str, Any], stale: int
) -> None:
    """Nothing in front of a window is read, from whatever page: it is NaN, and no page."""
    emulated.stale = stale
    for lengths in ([300, 0, 77, 1, 40], [500]):
        of_arrays = len(lengths), sizes["hq"], sizes["hk"], sizes["sq"], max(lengths)
        options = options_of(rng, name, of_arrays, DECODE_FEATURES)
        checked(rng, lengths, **sizes, **options)


def test_a_sequence_has_the_same_bits_in_any_batch(emulated: Emulator) -> None:
    """With a number of splits: what else there is makes no difference."""

    def first(lengths: list[int], splits: int) -> np.ndarray:
        return checked(np.random.default_rng(3), lengths, num_splits=splits)[0]

    for splits in (1, 3, 40):
        alone = first([211], splits)
        # Another batch draws other numbers, so the first sequence is taken from one array.
        assert alone.shape == (8, 1, 64)
    rng = np.random.default_rng(4)
    q, k, v = random_inputs(rng, "bfloat16", b=3, hq=8, hk=2, sq=1, sk=300, d=64)
    lengths = np.array([211, 300, 5], np.int32)

    def decoded(part: slice) -> np.ndarray:
        arrays = (on_gpu(x[part].copy()) for x in (q, k, v))
        return np.asarray(
            cufa.decode(*arrays, lengths=on_gpu(lengths[part].copy()), num_splits=5).get()
        )

    together = decoded(slice(0, 3))
    for i in range(3):
        assert np.array_equal(
            decoded(slice(i, i + 1))[0].view(np.uint16), together[i].view(np.uint16)
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("unified_max", "factor"), [(0.0, 1), (3.0, 1), (0.0, 30), (-200.0, 1)])
def test_a_unified_maximum(
    emulated: Emulator, rng: np.random.Generator, dtype: str, unified_max: float, factor: float
) -> None:
    """Whether it fits the scores or not: keys are then taken again."""
    options: dict[str, Any] = {"dtype": dtype, "unified_max": unified_max}
    checked(rng, [0, 500, 77, 3], scale=factor / 8, **options)
    checked(rng, [300, 20], hq=14, sq=3, scale=factor / 8, **options)
    checked(rng, [150, 0, 40], page_size=7, num_splits=3, scale=factor / 8, **options)


def test_how_often_keys_are_taken_again(emulated: Emulator, rng: np.random.Generator) -> None:
    def taken_again(lengths: list[int], **options: Any) -> int:
        checked(rng, lengths, **options)
        count = 0
        for variant in emulated.variants:
            if variant.unified:
                library = emulated.library(variant)
                counter = ctypes.c_int.in_dll(library, "decode_recomputed")
                count, counter.value = count + counter.value, 0
        return count

    taken_again([3], unified_max=0.0)  # whatever other tests have left
    for dtype in ("bfloat16", "float16"):
        assert taken_again([500, 0, 77], unified_max=0.0, dtype=dtype) == 0
        assert taken_again([500, 77], unified_max=500.0, dtype=dtype) > 4


def test_many_small_weights(emulated: Emulator) -> None:
    """Each of which 16 bits round, though their sum is large enough."""
    q, k = np.zeros((1, 1, 1, 32), np.float16), np.zeros((1, 1, 17_000, 32), np.float16)
    arrays = [on_gpu(x) for x in (q, k, np.ones_like(k))]
    out = cufa.decode(*arrays, num_splits=1, unified_max=float(np.log(2**24 / 128.49)))
    assert np.all(out.get() == 1)


@both_shares
@pytest.mark.parametrize("stale", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(
    "lengths", [[100] * 40, list(range(0, 200, 5)), [20] * 39 + [400]], ids=lambda x: str(x[-3:])
)
@exhaustive("decode", but=one_look)
def test_windows_of_many_sequences(
    emulated: Emulator, rng: np.random.Generator, lengths: list[int], stale: int
) -> None:
    emulated.stale = stale
    for left in (30, 90):
        checked(rng, lengths, hq=4, hk=1, window=(left, None))
        checked(rng, lengths, hq=4, hk=1, sq=2, page_size=16, num_splits=2, window=(left, 0))


def test_a_unified_maximum_of_any_score(rng: np.random.Generator) -> None:
    cases: list[tuple[list[int], dict[str, Any]]] = [
        ([300, 0, 77, 3], {}),
        ([150], {"sq": 3, "page_size": 7}),
    ]
    for name in DECODE_FEATURES:
        for lengths, sizes in cases:
            of_arrays = len(lengths), 8, 2, sizes.get("sq", 1), max(lengths)
            options = options_of(rng, name, of_arrays, DECODE_FEATURES)
            checked(rng, lengths, unified_max=1.0, **sizes, **options)


@pytest.mark.parametrize("sm_count", [13, 132])
@pytest.mark.parametrize("page_size", [0, 64])
def test_what_is_in_front_of_a_window_is_not_read(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, page_size: int, sm_count: int
) -> None:
    """Nobody can access that memory."""
    gpu = device.named("h200")._replace(sm_count=sm_count)
    monkeypatch.setattr(device, "of_id", lambda device_id: gpu)
    n, window = 20_000, (300, 0)
    q, k, v = random_inputs(rng, "bfloat16", hq=4, hk=1, sq=2, sk=n, d=64)
    first = n - 2 - window[0]
    options: dict[str, Any] = {"window": window}
    shape: tuple[int, ...] = k.shape
    if page_size:
        pages = -(-n // page_size)
        shape = (pages, 1, page_size, 64)
        table = np.arange(pages, dtype=np.int32)[None]
        options |= {"block_table": on_gpu(table), "lengths": on_gpu(np.array([n], np.int32))}
    caches = []
    for x in (k, v):
        memory = np.zeros(shape, x.dtype)
        memory.reshape(-1, 64)[:n] = x[0, 0]
        caches.append(on_gpu(memory))
    try:
        for cache in caches:
            forbid(cache, first * 64 * 2, 0)
        out, lse = cufa.decode(on_gpu(q), *caches, return_lse=True, **options)
    finally:
        for cache in caches:
            forbid(cache, first * 64 * 2, mmap.PROT_READ | mmap.PROT_WRITE)
    assert_each_accepted(out, lse, q, k, v, (n,), causal=True, window=window)


@pytest.mark.parametrize("page_size", [0, 32])
def test_lengths_that_grow_past_a_window(
    gpu: Gpu, rng: np.random.Generator, page_size: int
) -> None:
    """In the same memory, as what a graph replays finds them; and so are slopes and sinks."""
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=4, hk=1, sq=2, sk=320, d=64)
    caches = [on_gpu(x) for x in (k, v)]
    lengths, options = on_gpu(np.zeros(2, np.int32)), {"window": (100, None), "softcap": 9.0}
    given: dict[str, Any] = {"lengths": lengths, **options}
    if page_size:
        parts = (x.reshape(-1, page_size, 64) for x in (k, v))
        caches = [on_gpu(x[:, None]) for x in parts]
        given["block_table"] = on_gpu(np.arange(20, dtype=np.int32).reshape(2, 10))
    beside: dict[str, Any] = {
        name: on_gpu(np.zeros(4, np.float32)) for name in ("alibi_slopes", "sinks")
    }
    for now in ((0, 1), (99, 50), (102, 103), (119, 120), (320, 250), (3, 320)):
        lengths.host[...] = now
        for array in beside.values():
            array.host[...] = rng.random(4, np.float32)
        k_cache, v_cache = caches
        out, lse = cufa.decode(on_gpu(q), k_cache, v_cache, return_lse=True, **given, **beside)
        score = {name: array.get() for name, array in beside.items()} | options
        assert_each_accepted(out.get(), lse.get(), q, k, v, now, causal=True, **score)
    assert gpu.parsed == 1


def forbid(array: Array, nbytes: int, how: int) -> None:
    """Set what may be done with the whole pages of an array's bytes."""
    start = array.data.ptr
    end = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    mprotect = ctypes.CDLL(None).mprotect
    assert mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), how) == 0


@pytest.mark.parametrize("name", ["window", "alibi", "sinks", "all"])
def test_few_queries_of_attention(rng: np.random.Generator, name: str) -> None:
    sizes = 2, 4, 2, 2, 900
    b, hq, hk, sq, sk = sizes
    arrays = random_inputs(rng, "bfloat16", b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=64)
    options = {"causal": True, **options_of(rng, name, sizes, DECODE_FEATURES)}
    if "window" in options:
        options["window"] = (300, None)
    given: dict[str, Any] = {
        n: on_gpu(x) if isinstance(x, np.ndarray) else x for n, x in options.items()
    }
    q, k, v = (on_gpu(x) for x in arrays)
    for batch_invariant in (False, True):
        given["batch_invariant"] = batch_invariant
        assert isinstance(cufa.explain(q, k, v, **given), DecodePlan)
        out, lse = cufa.attention(q, k, v, return_lse=True, **given)
        assert_each_accepted(out, lse, *arrays, (sk, sk), **options)


def test_few_queries_of_attention_that_are_captured(
    gpu: Gpu, emulated: Emulator, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory another kernel takes their place, with their slopes and sinks."""
    arrays = random_inputs(rng, "float32", hq=4, hk=2, sq=1, sk=900, d=32)
    host = {name: rng.random(4, np.float32) for name in ("alibi_slopes", "sinks")}
    options: dict[str, Any] = {name: on_gpu(x) for name, x in host.items()}
    q, k, v = (on_gpu(x) for x in arrays)
    assert isinstance(cufa.explain(q, k, v, **options), DecodePlan)
    gpu.stream = Stream(capturing=True)
    monkeypatch.setattr(scratch, "current_capture", lambda: (1, 0))
    out, lse = cufa.attention(q, k, v, return_lse=True, **options)
    assert_each_accepted(out, lse, *arrays, (900,), **host)
    assert {v.kernel for v in emulated.variants} & {"fa2_fp32"}
