"""fa3_wgmma on a GPU with wgmma and TMA: its tiles, its order of work, and races."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from forgetting import forget_calls
from reference import Expected, assert_accepted, random_inputs, to_host
from test_gpu import GRID as ALL_KERNELS
from test_gpu import on_device, poisoned_out, same_bits

import cufa
from cufa import device
from cufa.compiler import jit, source
from cufa.device import Device
from cufa.launch import counters
from cufa.planner.plan import Plan
from cufa.planner.rules import all_variants
from cufa.specs.variant import Variant

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

H200 = device.named("h200")

Sizes = tuple[int, int, int, int, int]  # batch, heads of q and of K/V, queries, keys

dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


# All problems of a test are kept: those of the next layout or variant are the same.
@functools.lru_cache(16)
def inputs_of(dtype: str, sizes: Sizes, head_dims: tuple[int, int]) -> tuple[np.ndarray, ...]:
    b, hq, hk, sq, sk = sizes
    d, dv = head_dims
    rng = np.random.default_rng([*sizes, *head_dims])
    return random_inputs(rng, dtype, b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)


@functools.lru_cache(16)
def expected_of(dtype: str, sizes: Sizes, head_dims: tuple[int, int], causal: bool) -> Expected:
    return Expected(*inputs_of(dtype, sizes, head_dims), causal=causal)


def checked(
    cupy: Any,
    dtype: str,
    sizes: Sizes,
    head_dims: tuple[int, int],
    *,
    causal: bool,
    layout: str = "bhsd",
    kernel: str | Variant = "fa3_wgmma",
) -> None:
    """Compare a call on arrays within NaN with the oracle, and its bits with those of another."""
    q, k, v = inputs_of(dtype, sizes, head_dims)
    host = [q, k, v] if layout == "bhsd" else [x.swapaxes(1, 2) for x in (q, k, v)]
    given = on_device(cupy, *host)
    out = poisoned_out(cupy, host[0], host[2])
    cupy.full(q.shape[:-1], np.nan, np.float32)  # freed at once: the LSE's memory
    options: dict[str, Any] = {"causal": causal, "layout": layout, "kernel": kernel}
    _, lse = cufa.attention(*given, out=out, return_lse=True, **options)
    what = f"{sizes}, {head_dims}, causal {causal}, {layout}, {kernel}"
    result = to_host(out).swapaxes(1, 2) if layout == "bshd" else to_host(out)
    expected_of(dtype, sizes, head_dims, causal).assert_accepts(result, lse, what)
    again, lse_again = cufa.attention(*given, return_lse=True, **options)
    assert same_bits(again, out), what
    assert same_bits(lse_again, lse), what


# --- the grid ---

HEAD_DIMS = (
    *((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    *((32, 32), (40, 40), (80, 80), (160, 160), (17, 33), (250, 250)),
)

#: Odd lengths, more queries than keys and fewer, few of either; groups that are packed where
#: queries are few, those of 7 that are not; tiles of which the last keys are masked.
GRID: tuple[Sizes, ...] = (
    *(sizes for sizes in ALL_KERNELS if sizes[-1]),  # it needs a key
    (2, 8, 1, 5, 77),
    (1, 32, 2, 9, 130),
    (1, 64, 1, 2, 200),
    (1, 16, 4, 100, 300),
    (2, 4, 2, 191, 191),
)


@dtypes
@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
def test_grid(cupy: Any, d: int, dv: int, dtype: str) -> None:
    for sizes in GRID:
        for causal in (False, True):
            for layout in ("bhsd", "bshd"):
                checked(cupy, dtype, sizes, (d, dv), causal=causal, layout=layout)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("sq", "sk"), [(500, 3), (1000, 1), (700, 131), (193, 1)])
def test_rows_that_see_no_key(cupy: Any, sq: int, sk: int, d: int) -> None:
    """Whole tiles of them, too: zeros, and -inf as the log-sum-exp."""
    for hq, hk in ((2, 2), (8, 1)):
        checked(cupy, "bfloat16", (2, hq, hk, sq, sk), (d, d), causal=True)


@dtypes
def test_views_that_tma_does_not_take(cupy: Any, rng: np.random.Generator, dtype: str) -> None:
    q, k, v = random_inputs(rng, dtype, b=2, hq=4, sq=133, sk=93, d=64)
    k[:], v[:] = k[:1, :1], v[:1, :1]
    one = [cupy.asarray(x[:1, :1]) for x in (k, v)]
    given = [
        cupy.asarray(q[:, ::-1, ::-1])[:, ::-1, ::-1],
        *(cupy.broadcast_to(x, full.shape) for x, full in zip(one, (k, v), strict=True)),
    ]
    reversed_out = cupy.asarray(np.full(q.shape, np.nan, q.dtype))[:, :, ::-1]
    expected = Expected(q, k, v, causal=True)
    for out in (None, reversed_out, None):
        options: dict[str, Any] = {"causal": True, "return_lse": True, "kernel": "fa3_wgmma"}
        result, lse = cufa.attention(*given, out=out, **options)
        expected.assert_accepts(cupy.ascontiguousarray(result), lse)


# --- rows whose scores outgrow the maximum that P is taken relative to ---


def scores_in_steps(
    rng: np.random.Generator, dtype: str, d: int, dv: int | None = None, **sizes: int
) -> tuple[np.ndarray, ...]:
    """Return inputs for a scale of 1 / 8: early keys score up to 250 higher at every third query.

    The kernel takes late keys first, and where it missed a step P would be infinite: float16 holds
    no exp(12), float32 and bfloat16 no exp(89). Steps of both kinds are there.
    """
    q, k, v = random_inputs(rng, dtype, **sizes, d=d, dv=dv)
    q[..., ::3, 0], q[..., 1::3, 0], q[..., 2::3, 0] = 8, 0, 0
    early = [np.arange(k.shape[2]) < k.shape[2] * part for part in (0.15, 0.35, 0.6)]
    k[..., 0] = np.select(early, [250, 80, 40], 0)
    return q, k, v


@functools.lru_cache(4)
def steps_and_result(
    dtype: str, d: int, dv: int, causal: bool
) -> tuple[tuple[np.ndarray, ...], Expected]:
    """Return such inputs, and what is expected of them."""
    rng = np.random.default_rng([d, dv])
    given = scores_in_steps(rng, dtype, d, dv, hq=4, hk=2, sq=330, sk=700)
    return given, Expected(*given, causal=causal, scale=1 / 8)


@dtypes
@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_of_minus_infinity(cupy: Any, rng: np.random.Generator, d: int, dtype: str) -> None:
    """Whole tiles of them, before the first that is finite."""
    q, k, v = random_inputs(rng, dtype, hq=3, sq=200, sk=900, d=d)
    q[..., 0] = 1
    k[:, 1, 200:, 0] = k[:, 2, ::2, 0] = k[:, 2, 300:800, 0] = -np.inf
    given = on_device(cupy, q, k, v)
    for causal in (False, True):
        out, lse = cufa.attention(*given, causal=causal, return_lse=True, kernel="fa3_wgmma")
        assert_accepted(out, lse, q, k, v, causal=causal)


@dtypes
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_beside_one_that_is_not_finite(
    cupy: Any, rng: np.random.Generator, value: float, d: int, dtype: str
) -> None:
    """They share its warp, and what the warp does about it."""
    q, k, v = scores_in_steps(rng, dtype, d, b=2, hq=4, hk=2, sq=330, sk=700)
    others = np.arange(330) != 37
    expected = Expected(q[:, :, others], k, v, scale=1 / 8)
    q[:, :, 37] = value
    options: dict[str, Any] = {"scale": 1 / 8, "return_lse": True, "kernel": "fa3_wgmma"}
    out, lse = map(to_host, cufa.attention(*on_device(cupy, q, k, v), **options))
    assert np.isnan(out[:, :, 37].astype(np.float32)).all()
    expected.assert_accepts(out[:, :, others], lse[:, :, others])


@dtypes
@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_that_grow_in_packed_heads(
    cupy: Any, rng: np.random.Generator, d: int, dtype: str
) -> None:
    q, k, v = scores_in_steps(rng, dtype, d, b=3, hq=8, hk=1, sq=20, sk=700)
    q[:, 3:, :, 0] = 0  # a warp's rows belong to several heads
    given = on_device(cupy, q, k, v)
    for causal in (False, True):
        options: dict[str, Any] = {"causal": causal, "scale": 1 / 8}
        out, lse = cufa.attention(*given, return_lse=True, kernel="fa3_wgmma", **options)
        assert_accepted(out, lse, q, k, v, **options)


# --- all variants ---


def planned(*head_dims: int) -> list[Variant]:
    """Return the variants that plans can have."""
    return [
        v
        for v in all_variants(H200)
        if v.kernel == "fa3_wgmma"
        and (not head_dims or (v.head_dim in head_dims and v.head_dim == v.head_dim_v))
    ]


def fa3(d: int, dv: int, bm: int, bn: int, stages: int, blocks: int, turns: bool) -> Variant:
    dtype = "bfloat16" if bn % 32 else "float16"
    return Variant(
        "fa3_wgmma",
        dtype,
        d,
        dv,
        bm,
        bn,
        stages,
        bm // 16 + 4,
        blocks,
        ping_pong=turns,
        score=("Causal",),
    )


#: Variants that no plan has: all numbers of warpgroups, in turns or not; one stage and three,
#: as few as skipping masked keys allows, too; one block a multiprocessor to three; the narrowest
#: and the widest tiles, and each swizzle.
CAUSAL = [
    *(
        fa3(64, 64, bm, 64, bm // 64 - 1, 1, turns)
        for bm in (128, 192, 256)
        for turns in (False, True)
    ),
    *(fa3(64, 64, 64, 64, 2, blocks, False) for blocks in (1, 2, 3)),
    *(fa3(64, 64, 64, bn, 3, 1, False) for bn in (48, 144, 176, 256)),
    *(fa3(128, 128, bm, 64, 3, 1, turns) for bm in (128, 192) for turns in (False, True)),
    *(fa3(128, 128, bm, 80, bm // 64 - 1, 1, True) for bm in (128, 192, 256)),
    *(fa3(128, 128, 64, 32, 2, blocks, False) for blocks in (1, 2)),
    *(fa3(128, 128, 128, 32, stages, 1, True) for stages in (2, 3)),
    *(fa3(256, 256, 128, bn, 2, 1, turns) for bn in (32, 48) for turns in (False, True)),
    *(fa3(192, 64, 128, 96, 2, 1, turns) for turns in (False, True)),
    *(fa3(96, 160, bm, 64, 2, 1, False) for bm in (64, 128)),
    *(fa3(32, 32, bm, 128, 2, 1, bm > 64) for bm in (64, 128, 192, 256)),
    *(fa3(80, 80, bm, 80, 2, 1, bm > 64) for bm in (64, 128, 192)),
    *(fa3(48, 176, 128, 48, 2, 1, turns) for turns in (False, True)),
    *(fa3(16, 48, 192, 112, 2, 1, turns) for turns in (False, True)),
]
OTHERS = [*CAUSAL, *(variant._replace(score=()) for variant in CAUSAL[::3])]


def problem_of(variant: Variant) -> tuple[str, int, int, bool]:
    """Return what of a variant is the problem's."""
    return variant.dtype, variant.head_dim, variant.head_dim_v, variant.causal


#: More keys than queries and fewer, packed ones, few keys, more tiles than blocks; with a causal
#: mask, tiles whose first warpgroups see fewer keys than the last.
SHAPES: tuple[Sizes, ...] = (
    (2, 4, 2, 300, 427),
    (1, 2, 2, 450, 100),
    (1, 3, 3, 65, 65),
    (1, 8, 1, 7, 130),
    (2, 3, 3, 200, 5),
    (1, 1, 1, 5, 1),
    (5, 82, 82, 5, 40),
    (2, 67, 67, 200, 130),
)


@pytest.mark.parametrize("variant", planned(), ids=str)
def test_planned_variants(cupy: Any, variant: Variant) -> None:
    head_dims = (variant.head_dim, variant.head_dim_v)
    for sizes in SHAPES:
        checked(cupy, variant.dtype, sizes, head_dims, causal=variant.causal, kernel=variant)


@pytest.mark.parametrize("variant", OTHERS, ids=str)
def test_other_variants(cupy: Any, variant: Variant) -> None:
    causal = variant.causal
    head_dims = (variant.head_dim - 8, variant.head_dim_v - 16)
    for sizes in SHAPES:
        checked(cupy, variant.dtype, sizes, head_dims, causal=causal, kernel=variant)


# The cases of one problem come together, so that `steps_and_result` keeps it.
@pytest.mark.parametrize(
    "variant", [*sorted(planned(), key=problem_of), *sorted(OTHERS, key=problem_of)], ids=str
)
def test_scores_that_grow_in_steps(cupy: Any, variant: Variant) -> None:
    """In every element of a batch of the same, which has more tiles than there are blocks."""
    (q, k, v), expected = steps_and_result(*problem_of(variant))
    options: dict[str, Any] = {"causal": variant.causal, "scale": 1 / 8, "return_lse": True}
    given = [cupy.asarray(np.repeat(x, 40, axis=0)) for x in (q, k, v)]
    out, lse = map(to_host, cufa.attention(*given, kernel=variant, **options))
    expected.assert_accepts(out[:1], lse[:1])
    assert same_bits(out, np.repeat(out[:1], 40, axis=0))
    assert same_bits(lse, np.repeat(lse[:1], 40, axis=0))


@pytest.mark.parametrize("variant", planned(64, 128, 256), ids=str)
@pytest.mark.parametrize(("score", "keys"), [(88.5, 2), (87.5, 4)])
def test_row_sums_beyond_float32(
    cupy: Any, rng: np.random.Generator, score: float, keys: int, variant: Variant
) -> None:
    """The part of each of the four lanes of a row is finite."""
    q, k, v = random_inputs(rng, variant.dtype, hq=2, sq=330, sk=1000, d=variant.head_dim)
    q[:], k[:] = 0, 0
    q[..., 0] = 1
    k[:, :, : 2 * keys : 2, 0] = score  # of the tile that is taken last, a key a lane
    options: dict[str, Any] = {"causal": variant.causal, "scale": 1}
    given = on_device(cupy, q, k, v)
    out, lse = cufa.attention(*given, return_lse=True, kernel=variant, **options)
    assert_accepted(out, lse, q, k, v, **options)


@pytest.mark.parametrize("d", [64, 256])
def test_scale_of_zero_and_many_keys(cupy: Any, rng: np.random.Generator, d: int) -> None:
    """P is 1 whatever it is taken relative to, and the row sum outgrows float16."""
    q, k, v = random_inputs(rng, "float16", sq=64, sk=140_000, d=d)
    v += 1
    given = on_device(cupy, q, k, v)
    out, lse = cufa.attention(*given, scale=0, return_lse=True, kernel="fa3_wgmma")
    assert_accepted(out, lse, q, k, v, scale=0)


# --- tiles that blocks draw ---


def many_tiles(
    cupy: Any, rng: np.random.Generator, hopper: Device, *, d: int = 64, heads: int = 60
) -> tuple[list[np.ndarray], list[Any], dict[str, Any]]:
    """Return a causal problem with more tiles than blocks: on the host, on the GPU, its options."""
    host = list(random_inputs(rng, "bfloat16", b=2, hq=heads, sq=300, sk=250, d=d))
    given = [cupy.asarray(x) for x in host]
    options: dict[str, Any] = {"causal": True, "kernel": "fa3_wgmma", "return_lse": True}
    chosen = cufa.explain(*given, causal=True, kernel="fa3_wgmma")
    assert isinstance(chosen, Plan)
    assert 2 * heads * chosen.q_tiles > chosen.grid
    assert chosen.grid == hopper.sm_count * chosen.variant.blocks_per_sm
    cupy.cuda.get_current_stream().synchronize()
    return host, given, options


def same(cupy: Any, a: Any, b: Any) -> Any:
    """Whether two arrays have the same bits, as an array on the GPU."""
    bits = np.dtype(f"u{a.itemsize}")
    return (a.view(bits) == b.view(bits)).all()


def test_graph_of_a_causal_call(cupy: Any, rng: np.random.Generator, hopper: Device) -> None:
    """It is replayed with other inputs, and with calls on the stream that it comes from."""
    (q, k, v), given, options = many_tiles(cupy, rng, hopper)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = cupy.zeros(q.shape, q.dtype)
        usual, usual_lse = cufa.attention(*given, **options)
        stream.synchronize()
        stream.begin_capture()
        lses = [cufa.attention(*given, out=out, **options)[1] for _ in range(2)]
        graph = stream.end_capture()
        assert_accepted(usual, usual_lse, q, k, v, causal=True)
        with cupy.cuda.Stream(non_blocking=True) as other:
            for _ in range(10):
                graph.launch(other)
                beside = [cufa.attention(*given, **options)[0] for _ in range(2)]
                with stream:
                    beside += [cufa.attention(*given, **options)[0] for _ in range(2)]
                for each in (stream, other):
                    each.synchronize()
                assert all(bool(same(cupy, usual, x)) for x in (out, *beside))
                assert all(bool(same(cupy, usual_lse, x)) for x in lses)
                out.view(np.uint16).fill(0)
            others = [rng.standard_normal(x.shape, np.float32).astype(x.dtype) for x in (q, k, v)]
            for there, here in zip(given, others, strict=True):
                there[...] = cupy.asarray(here)
            graph.launch(other)
            other.synchronize()
        assert_accepted(out, lses[1], *others, causal=True)


@pytest.mark.parametrize("threaded", [False, True])
def test_streams_at_the_same_time(
    cupy: Any, rng: np.random.Generator, hopper: Device, threaded: bool
) -> None:
    problems = [many_tiles(cupy, rng, hopper, d=d, heads=h) for d, h in ((64, 64), (128, 96))]
    expected = []
    for host, given, options in problems:
        out, lse = cufa.attention(*given, **options)
        assert_accepted(out, lse, *host, causal=True)
        expected.append((out, lse))
    cupy.cuda.get_current_stream().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    right: list[Any] = []

    def calls(number: int) -> None:
        with streams[number]:
            _, given, options = problems[number % 2]
            for _ in range(5):
                found = cufa.attention(*given, **options)
                right.extend(
                    same(cupy, a, b) for a, b in zip(found, expected[number % 2], strict=True)
                )

    for _ in range(4):
        if threaded:
            threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for number in range(4):
                calls(number)
    for stream in streams:
        stream.synchronize()
    assert len(right) == 4 * 4 * 5 * 2
    assert all(map(bool, right))
    words = [
        cupy.ndarray(memory.size // 4, np.int32, cupy.cuda.MemoryPointer(memory, 0))
        for memory in counters.of_device(cupy.cuda.runtime.getDevice())._memory
    ]
    assert words
    assert not any(bool(x.any()) for x in words)


@pytest.mark.parametrize("per_thread", [False, True])
def test_streams_that_are_gone_before_their_work_is_done(
    cupy: Any, rng: np.random.Generator, hopper: Device, per_thread: bool
) -> None:
    """Another stream may come to have the name of one whose kernels still run."""
    _, given, options = many_tiles(cupy, rng, hopper, d=128, heads=150)
    expected, _ = cufa.attention(*given, **options)
    cupy.cuda.get_current_stream().synchronize()
    found: list[Any] = []

    def calls() -> None:
        stream = cupy.cuda.Stream.ptds if per_thread else cupy.cuda.Stream(non_blocking=True)
        with stream:
            found.extend(cufa.attention(*given, **options)[0] for _ in range(5))

    for _ in range(20):
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
    cupy.cuda.runtime.deviceSynchronize()
    assert all(bool(same(cupy, x, expected)) for x in found)


def test_the_first_call_of_a_thread(cupy: Any, rng: np.random.Generator) -> None:
    """Nothing but it makes the device's context the thread's."""
    given = [
        cupy.asarray(x) for x in random_inputs(rng, "bfloat16", hq=4, hk=4, sq=200, sk=200, d=64)
    ]
    outs = [cupy.full_like(given[0], np.nan) for _ in range(2)]

    def calls() -> None:
        cufa.attention(*given, out=outs[0])  # of new lengths: it makes tensor maps

    def calls_again() -> None:
        cufa.attention(*given, out=outs[1])

    for target in (calls, calls_again):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    cupy.cuda.runtime.deviceSynchronize()
    expected = cufa.attention(*given)
    assert all(same(cupy, out, expected) for out in outs)


def test_threads_on_one_stream(cupy: Any, rng: np.random.Generator, hopper: Device) -> None:
    """Their first calls, each of its own problem, come at once."""
    problems = [many_tiles(cupy, rng, hopper, heads=70 + 2 * n) for n in range(4)]
    expected = [cufa.attention(*given, **options)[0] for _, given, options in problems]
    wrong: list[int] = []
    for _ in range(5):
        stream = cupy.cuda.Stream(non_blocking=True)
        barrier = threading.Barrier(4)

        def calls(number: int, stream: Any = stream, barrier: threading.Barrier = barrier) -> None:
            _, given, options = problems[number]
            barrier.wait()
            with stream:
                found = [cufa.attention(*given, **options)[0] for _ in range(5)]
                wrong.extend(number for x in found if not same(cupy, x, expected[number]))

        cupy.cuda.get_current_stream().synchronize()
        threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stream.synchronize()
    assert wrong == []


# --- races show as other bits, or as waits without end ---


def random_sizes(rng: np.random.Generator) -> Sizes:
    """Draw few long sequences, or short ones, enough for several tiles a block."""
    while True:
        sq, sk = (int(rng.choice([rng.integers(1, 20), rng.integers(1, 700)])) for _ in range(2))
        hk = int(rng.choice([1, 2, 3, 16, 40]))
        hq = hk * int(rng.choice([1, 1, 2, 3, 4, 8]))
        b = int(rng.choice([1, 2, 5]))
        scores, rows = b * hq * sq * sk, b * (hq * sq + hk * sk)
        if scores < 2_000_000 and rows < 100_000:  # the oracle computes them, too
            return b, hq, hk, sq, sk


def test_10000_launches(cupy: Any, rng: np.random.Generator) -> None:
    """200 random problems, 50 times each, with the same bits every time."""
    for _ in range(200):
        b, hq, hk, sq, sk = random_sizes(rng)
        d, dv = [(64, 64), (128, 128), (192, 128), (256, 256)][rng.integers(4)]
        causal = bool(rng.integers(2))
        what = f"{(b, hq, hk, sq, sk)}, {(d, dv)}, causal {causal}"
        q, k, v = random_inputs(rng, "bfloat16", b=b, hq=hq, hk=hk, sq=sq, sk=sk, d=d, dv=dv)
        given = [cupy.asarray(x) for x in (q, k, v)]
        out = poisoned_out(cupy, q, v)
        options: dict[str, Any] = {"causal": causal, "kernel": "fa3_wgmma", "return_lse": True}
        _, lse = cufa.attention(*given, out=out, **options)
        first = out.copy()
        assert_accepted(first, lse, q, k, v, causal=causal, what=what)
        right = cupy.ones((), bool)
        for _ in range(49):
            out.view(np.uint16).fill(0xFFFF)  # NaN
            _, lse_again = cufa.attention(*given, out=out, **options)
            right &= same(cupy, out, first)
            right &= same(cupy, lse_again, lse)
        assert bool(right), what


@pytest.fixture
def bounded_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a wait of the producer or of a consumer that does not end be an error."""

    def forget() -> None:
        jit.module.cache_clear()
        jit._kernel.cache_clear()
        forget_calls()

    text = source.text
    bounded = functools.cache(lambda kernel: f"#define BOUNDED_WAITS\n{text(kernel)}")
    monkeypatch.setattr(source, "text", bounded)
    forget()
    yield
    forget()


@pytest.mark.parametrize("variant", planned(64, 128, 256), ids=str)
@pytest.mark.usefixtures("bounded_waits")
def test_waits_end(cupy: Any, variant: Variant) -> None:
    head_dims = (variant.head_dim, variant.head_dim_v)
    causal = variant.causal
    for sizes in (
        *SHAPES,
        (1, 1, 1, 1000, 1),
        (1, 1, 1, 1, 1000),
        (2, 33, 33, 193, 193),
        (1, 3, 3, 1000, 1000),
        (7, 64, 1, 20, 90),
    ):
        checked(cupy, variant.dtype, sizes, head_dims, causal=causal, kernel=variant)


LITTER = """
extern "C" __global__ void litter(int words) {
    extern __shared__ volatile int memory[];
    for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = -1;
}
"""


@pytest.mark.parametrize("variant", [v for v in planned(64, 128, 256) if v.causal], ids=str)
@pytest.mark.usefixtures("bounded_waits")
def test_blocks_of_one_tile_do_not_mind_what_others_left_in_shared_memory(
    cupy: Any, hopper: Device, variant: Variant
) -> None:
    litter = cupy.RawKernel(LITTER, "litter")
    litter.max_dynamic_shared_size_bytes = size = hopper.smem_per_block
    for sizes in ((1, 1, 1, 100, 100), (1, 2, 2, 300, 700), (1, 6, 2, 700, 300)):
        litter((4 * hopper.sm_count,), (256,), (size // 4,), shared_mem=size)
        head_dims = (variant.head_dim, variant.head_dim_v)
        checked(cupy, variant.dtype, sizes, head_dims, causal=True, kernel=variant)
