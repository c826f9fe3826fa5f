"""decode_fp8.cu and decode_int8.cu on the host, from `cufa.decode` on."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from eight_bits import E4M3, Cache, assert_every_byte, in_pages8, poisoned8, quantized8
from emulated import FOLDERS, LANES, Emulator, load_shared, needs_compiler
from exhaustive import exhaustive
from played_gpu import Gpu, on_gpu
from reference import DTYPES, random_inputs
from score_arrays import DECODE_FEATURES, options_of
from shared_libraries import Sources
from test_decode import assert_each_accepted, firsts_of
from test_emulated import emulator  # noqa: F401
from test_emulated_decode import SCORE, both_shares, emulated, one_look, shares  # noqa: F401

import cufa
from cufa import device
from cufa.specs.variant import Variant

pytestmark = needs_compiler

KERNELS = {"uint8": "decode_fp8", "int8": "decode_int8"}
KINDS = tuple(KERNELS)
TYPES = ("float16", "bfloat16")


def checked8(
    rng: np.random.Generator,
    lengths: Any,
    *,
    kind: str = "uint8",
    hq: int = 8,
    hk: int = 2,
    sq: int = 1,
    d: int = 64,
    dv: int = 64,
    page_size: int = 0,
    causal: bool = True,
    dtype: str = "bfloat16",
    layout: str = "bhsd",
    scaled_by: np.ndarray | None = None,
    **options: Any,
) -> np.ndarray:
    """Decode sequences of these lengths, accept the results, and return them.

    `scaled_by` are factors of the keys' values.
    """
    b, capacity = len(lengths), max(lengths)
    q, k, v = random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=capacity, d=d, dv=dv)
    if scaled_by is not None:
        v = v.astype(np.float32) * scaled_by[:, None]
    k8, v8 = quantized8(k, kind), quantized8(v, kind)
    k, v = k8.numbers, v8.numbers
    firsts = firsts_of(lengths, sq, options)
    given: dict[str, Any] = {"lengths": on_gpu(np.array(lengths, np.int32)), "layout": layout}
    if page_size:
        seed = int(rng.integers(1 << 30))
        (k8, table), (v8, _) = (
            in_pages8(np.random.default_rng(seed), cache, lengths, page_size, firsts)
            for cache in (k8, v8)
        )
        given["block_table"] = on_gpu(table)
    else:
        k8, v8 = (poisoned8(cache, lengths, firsts) for cache in (k8, v8))
    if layout == "bshd":
        k8, v8 = k8.turned(), v8.turned()
    score = {name: options[name] for name in SCORE if name in options}
    given |= {n: on_gpu(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    q_there = on_gpu(q if layout == "bhsd" else q.swapaxes(1, 2))
    out, lse = decode8(q_there, k8, v8, causal=causal, return_lse=True, **given)
    out = out.get() if layout == "bhsd" else out.get().swapaxes(1, 2)
    assert_each_accepted(out, lse.get(), q, k, v, lengths, causal=causal, **score)
    return np.asarray(out)


def decode8(q: Any, k: Cache, v: Cache, **options: Any) -> Any:
    """Decode on caches of 8 bits."""
    caches = [on_gpu(x) for x in (*k, *v)]
    return cufa.decode(q, caches[0], caches[2], k_scale=caches[1], v_scale=caches[3], **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths", [[300], [0, 500, 77], [7] * 20], ids=str)
def test_lengths(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    lengths: list[int],
    dtype: str,
    kind: str,
) -> None:
    checked8(rng, lengths, kind=kind, dtype=dtype)
    assert {v.kernel for v in emulated.variants} & {KERNELS[kind]}


WAYS: list[dict[str, Any]] = [
    *({"d": n, "dv": n} for n in (32, 96, 128, 192, 256)),
    *({"d": 40, "dv": 72}, {"d": 256, "dv": 64}, {"d": 64, "dv": 37}),
    *({"page_size": n} for n in (1, 7, 16, 48, 64)),
    {"page_size": 16, "d": 128, "dv": 128, "layout": "bshd", "num_splits": 3},
    *({"sq": 5}, {"sq": 9}, {"hq": 71, "hk": 1}, {"sq": 5, "page_size": 7}),
    *({"sq": 16, "page_size": n} for n in (16, 48, 64)),
    *({"sq": 5, "d": n, "dv": n, "num_splits": 2} for n in (32, 96)),
    *({"sq": 9, "d": n, "dv": n, "page_size": 16} for n in (32, 96, 128)),
    {"hq": 40, "hk": 1, "d": 256, "dv": 256},
    *({"num_splits": n} for n in (2, 3, 4)),
    {"layout": "bshd", "sq": 2, "causal": False, "scale": -0.1},
]


@both_shares
@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("options", WAYS, ids=str)
@exhaustive("decode8", one_in=9)
def test_ways(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    options: dict[str, Any],
    dtype: str,
    kind: str,
    stale: int,
) -> None:
    """Head dims, pages, rows of one warp and of two, pieces; lengths that change meanwhile."""
    emulated.stale = stale
    checked8(rng, [150, 2, 400, 0, 33], kind=kind, dtype=dtype, **options)
    checked8(rng, [700], kind=kind, dtype=dtype, **options)


@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"hq": 8, "hk": 2, "sq": 1, "dtype": "float16"},
        {"hq": 6, "hk": 2, "sq": 3, "page_size": 7},
        {"hq": 14, "hk": 1, "sq": 2, "page_size": 16, "num_splits": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", DECODE_FEATURES)
@exhaustive("decode8", one_in=6)
def test_scores(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    name: str,
    sizes: dict[str, Any],
    kind: str,
    stale: int,
) -> None:
    """Nothing in front of a window is read, from whatever page: it is NaN, and no page."""
    emulated.stale = stale
    for lengths in ([300, 0, 77, 1, 40], [500]):
        of_arrays = len(lengths), sizes["hq"], sizes["hk"], sizes["sq"], max(lengths)
        options = options_of(rng, name, of_arrays, DECODE_FEATURES)
        checked8(rng, lengths, kind=kind, **sizes, **options)


#: bm, bn, stages and warps.
FORCED = (
    *((16, 16, 1, 3), (16, 64, 2, 2), (16, 128, 1, 2)),
    *((32, 16, 3, 6), (32, 64, 1, 2), (64, 32, 2, 4)),
)


def forced(kind: str, d: int, *tile: int) -> Variant:
    """Return a variant for one query of float16, by its bm, bn, stages and warps."""
    sizes = ", ".join(map(str, (d, d, *tile, 1)))
    return Variant.parse(f"{KERNELS[kind]}<float16, {sizes}, false, Score<>, Contiguous>")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [32, 64])
@pytest.mark.parametrize("tile", FORCED, ids=str)
@exhaustive("decode8", one_in=5)
def test_tiles_that_are_forced(
    rng: np.random.Generator, tile: tuple[int, ...], d: int, kind: str
) -> None:
    sizes: dict[str, Any] = {"dtype": "float16", "hq": 24, "d": d, "dv": d}
    checked8(rng, [300, 0, 77], kind=kind, **sizes, kernel=forced(kind, d, *tile))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bn", [48, 80, 112])
def test_tiles_that_threads_do_not_share_out_evenly(
    rng: np.random.Generator, bn: int, kind: str
) -> None:
    kernel = forced(kind, 32, 16, bn, 1, 2)
    with pytest.raises(ValueError, match="bn 16, 32, 64 or 128"):
        checked8(rng, [300], kind=kind, dtype="float16", d=32, dv=32, kernel=kernel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"hq": 12, "hk": 1, "d": 256},
        {"hq": 4, "hk": 1, "page_size": 16},
        {"hq": 40, "hk": 2, "d": 32, "page_size": 7},
    ],
    ids=str,
)
@exhaustive("decode8", one_in=2)
def test_warps_take_turns_at_random(
    emulated: Emulator,  # noqa: F811
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    kind: str,
) -> None:
    """Blocks have several sequences, and lengths and pages are still written."""
    monkeypatch.setattr(device, "of_id", lambda _: device.named("h200")._replace(sm_count=2))
    for emulated.seed in (*range(1, 9), LANES + 4):
        checked8(rng, [150, 2, 400, 0, 33], kind=kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("factor", [1e-5, 5.0])
def test_scales_of_v_that_differ(
    rng: np.random.Generator, factor: float, dtype: str, kind: str
) -> None:
    """By a thousand, rising and falling; products with P exceed float16, or fall below it."""
    keys = np.arange(500)
    for exponents in (keys / 500, 1 - keys / 500, rng.random(500), keys == 300):
        by = (factor * 1000.0**exponents).astype(np.float32)
        checked8(rng, [500, 33], kind=kind, dtype=dtype, scaled_by=by)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("unseen", [False, True])
def test_queries_with_numbers_that_differ(
    rng: np.random.Generator, unseen: bool, dtype: str, kind: str
) -> None:
    """By a thousand, and by 2^100; the largest may meet zeros: what is small counts then."""
    q, k, v = random_inputs(rng, dtype, b=1, hq=24, hk=2, sq=1, sk=300, d=128)
    q = q.astype(np.float32)
    q[..., 5] *= 1000
    if dtype == "bfloat16":
        q[:, ::3] *= np.float32(2.0**-100)
    q = q.astype(DTYPES[dtype])
    if unseen:
        k[..., 5] = 0
    k8, v8 = quantized8(k, kind), quantized8(v, kind)
    lengths = on_gpu(np.array([300], np.int32))
    out, lse = decode8(on_gpu(q), k8, v8, lengths=lengths, return_lse=True)
    assert_each_accepted(out.get(), lse.get(), q, k8.numbers, v8.numbers, [300])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("d", [64, 256])
def test_the_largest_sums_of_integers(rng: np.random.Generator, d: int, dtype: str) -> None:
    """-128, too, which caches do not hold but callers may; whatever the number of rows is."""
    q, _, v = random_inputs(rng, dtype, b=1, hq=17, hk=1, sq=1, sk=20, d=d)
    q[0, :3], q[0, 3:6] = 3, -3
    values = np.full((1, 1, 20, d), -128, np.int8)
    values[0, 0, ::2], values[0, 0, 1, : d // 2] = 127, 0
    k8 = Cache(values, np.exp2(rng.uniform(-14, -10, (1, 1, 20))).astype(np.float32))
    v8 = quantized8(v, "int8")
    for rows in (1, 7, 8, 9, 15, 16, 17):
        some = q[:, :rows].copy()
        out, lse = decode8(on_gpu(some), k8, v8, return_lse=True)
        assert_each_accepted(out.get(), lse.get(), some, k8.numbers, v8.numbers, [20])


@pytest.mark.parametrize("exponent", [-118, -100, -50, 50, 100])
def test_tiny_and_huge_queries(rng: np.random.Generator, exponent: int) -> None:
    """Keys make up for it; zeros and numbers that float32 hardly has are among them."""
    q, k, v = random_inputs(rng, "bfloat16", b=1, hq=12, hk=1, sq=1, sk=100, d=64)
    q = q.astype(np.float32) * np.float32(2.0**exponent)
    q[0, 5], q[0, 6] = 0, np.float32(2.0**-126)
    q = q.astype(DTYPES["bfloat16"])
    k8, v8 = quantized8(k, "int8"), quantized8(v, "int8")
    k8 = k8._replace(scales=k8.scales * np.float32(2.0**-exponent))
    out, lse = decode8(on_gpu(q), k8, v8, return_lse=True)
    assert_each_accepted(out.get(), lse.get(), q, k8.numbers, v8.numbers, [100])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponent", [-126, -50, 50, 119, 120, 126, 127])
def test_scales_of_v_of_any_size(exponent: int, kind: str) -> None:
    ones = np.full((1, 1, 1, 64), 1 if kind == "int8" else 0x38).astype(kind)
    k, v = (Cache(ones, np.full((1, 1, 1), x, np.float32)) for x in (1.0, 2.0**exponent))
    for rows in (4, 20):
        out = decode8(on_gpu(np.ones((1, rows, 1, 64), DTYPES["bfloat16"])), k, v)
        assert (out.get().astype(np.float64) == 2.0**exponent).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_is_its_rows_alone(
    rng: np.random.Generator, number: float, dtype: str, kind: str
) -> None:
    q, k, v = random_inputs(rng, dtype, b=1, hq=24, hk=2, sq=1, sk=50, d=64)
    k8, v8 = quantized8(k, kind), quantized8(v, kind)
    expected = decode8(on_gpu(q), k8, v8).get().astype(np.float32)
    q[0, [3, 20], 0, 7] = number
    found = decode8(on_gpu(q), k8, v8).get().astype(np.float32)
    wrong = np.isin(np.arange(24), [3, 20])
    assert np.isnan(found[0, wrong]).all()
    np.testing.assert_array_equal(found[0, ~wrong], expected[0, ~wrong])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_byte(dtype: str, kind: str) -> None:
    def decoded(q: np.ndarray, k: Cache, v: Cache, **options: Any) -> Any:
        return decode8(on_gpu(q), k, v, **options)

    assert_every_byte(decoded, dtype, kind)


def test_a_sequence_has_the_same_bits_in_any_batch(rng: np.random.Generator) -> None:
    """With a number of splits: what else there is makes no difference."""
    q, k, v = random_inputs(rng, "float16", b=3, hq=8, hk=2, sq=1, sk=300, d=64)
    k8, v8 = quantized8(k, "int8"), quantized8(v, "int8")
    lengths = np.array([211, 300, 5], np.int32)

    def decoded(part: slice) -> np.ndarray:
        k_part, v_part = (Cache(*(x[part].copy() for x in cache)) for cache in (k8, v8))
        there = on_gpu(lengths[part].copy())
        found = decode8(on_gpu(q[part].copy()), k_part, v_part, lengths=there, num_splits=5)
        return np.asarray(found.get())

    together = decoded(slice(0, 3))
    for i in range(3):
        np.testing.assert_array_equal(decoded(slice(i, i + 1))[0], together[i])


def test_calls_that_come_again(gpu: Gpu, rng: np.random.Generator) -> None:
    """With other strides and dtypes of scales, without them, and with odd addresses."""
    q, k, v = random_inputs(rng, "bfloat16", b=2, hq=8, hk=2, sq=1, sk=100, d=64)
    k8, v8 = quantized8(k, "uint8"), quantized8(v, "uint8")
    given = on_gpu(q)
    expected = decode8(given, k8, v8).get()
    for _ in range(2):
        np.testing.assert_array_equal(decode8(given, k8, v8).get(), expected)
    arrays = [on_gpu(x) for x in (k8.values, v8.values)]
    wide = np.full((*k8.scales.shape, 3), np.nan, np.float32)
    wide[..., 1] = k8.scales
    scales = on_gpu(wide)[..., 1], on_gpu(v8.scales)
    for _ in range(2):
        out = cufa.decode(given, *arrays, k_scale=scales[0], v_scale=scales[1])
        np.testing.assert_array_equal(out.get(), expected)
    wrongs: tuple[dict[str, Any], ...] = (
        {"k_scale": scales[0]},
        {"k_scale": scales[0], "v_scale": on_gpu(v8.scales[..., :99])},
        {"k_scale": scales[0], "v_scale": on_gpu(v8.scales.astype(np.float64))},
    )
    for wrong in wrongs:
        with pytest.raises((TypeError, ValueError), match="v_scale"):
            cufa.decode(given, *arrays, **wrong)
    with pytest.raises(TypeError, match="q has dtype float32: on the GPU"):
        decode8(on_gpu(q.astype(np.float32)), k8, v8)
    odd = np.zeros(k8.values.size + 1, np.uint8)
    odd[1:] = k8.values.ravel()
    at_odd = on_gpu(odd)[1:].reshape(k8.values.shape)
    for _ in range(2):
        out = cufa.decode(given, at_odd, arrays[1], k_scale=scales[0], v_scale=scales[1])
        np.testing.assert_array_equal(out.get(), expected)


EXPAND = """
#include "ptx_sm90.cuh"
#include "expand.cuh"
template <class Expand>
static void each(uint32_t* out, Expand expand) {
    for (uint32_t i = 0; i < 256; i += 4) {
        const uint32_t four = i | (i + 1) << 8 | (i + 2) << 16 | (i + 3) << 24;
        uint32_t two[2];
        expand(two, four);
        out[i / 2] = two[0], out[i / 2 + 1] = two[1];
    }
}
template <class T>
static void expand(uint32_t* out, bool by_bits, bool integers) {
    integers ? each(out, Int8::expand<T>)
    : by_bits ? each(out, E4m3::by_bits<T>) : each(out, E4m3::by_instruction<T>);
}
extern "C" void expand_all(uint32_t* out, bool is_float16, bool by_bits, bool integers) {
    is_float16 ? expand<float16>(out, by_bits, integers) : expand<bfloat16>(out, by_bits, integers);
}
extern "C" void expand_columns(uint32_t* out, bool integers) {
    integers ? each(out, Int8::expand_columns) : each(out, E4m3::expand_columns);
}
"""


def expanded(name: str, dtype: str, *options: bool) -> np.ndarray:
    """Return all bytes in turn, expanded by a function of the source above."""
    load_shared()
    library = ctypes.CDLL(str(Sources(*FOLDERS).library(EXPAND, "-nostdlib")))
    out = np.zeros(256, DTYPES[dtype])
    getattr(library, name)(ctypes.c_void_p(out.ctypes.data), *options)
    return out.astype(np.float32)


@pytest.mark.parametrize("way", ["int8", "e4m3 by bits", "e4m3 by an instruction"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_byte_is_expanded(dtype: str, way: str) -> None:
    """Also as before sm_89, where e4m3 has no instruction."""
    found = expanded("expand_all", dtype, dtype == "float16", "bits" in way, way == "int8")
    every = np.arange(256, dtype=np.uint8).view(np.int8 if way == "int8" else E4M3)
    np.testing.assert_array_equal(found, every.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.int8, E4M3], ids=str)
def test_every_byte_is_expanded_by_columns(dtype: Any) -> None:
    found = expanded("expand_columns", "float16", dtype == np.int8)
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(found.reshape(-1, 2, 2).swapaxes(1, 2).ravel(), every)
