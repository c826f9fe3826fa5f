"""rules.py: which variant a problem takes, and that it is the one measured as fastest."""

from __future__ import annotations

import itertools
import math
import timeit
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa import device
from cufa.device import Device
from cufa.kernel import KERNELS
from cufa.planner.plan import plan
from cufa.planner.rules import busiest, busiest_causal
from cufa.planner.tiles import TileShape, all_head_dims, tiles
from cufa.problem import Problem

HOPPER = [device.named("h100"), device.named("h200")]
H200 = device.named("h200")

#: bm, bn, stages, blocks_per_sm and ping_pong.
Tile = tuple[int, int, int, int, bool]
WIDE, WIDE_3 = (192, 128, 2, 1, True), (192, 128, 3, 1, True)
SMALL = (64, 64, 3, 3, False)
LONG, LONG_3, SQUARE = (192, 80, 2, 1, True), (192, 80, 3, 1, True), (128, 128, 2, 1, True)
TURNS, NO_TURNS = (128, 64, 2, 1, True), (128, 64, 2, 1, False)

#: What was the fastest of all tiles, or within 1% of it, in 16384 tokens of 2048 columns: head dim,
#: causal, and a tile for each sequence length from 512 to 16384.
STANDARD: list[tuple[int, bool, list[Tile]]] = [
    (64, False, [WIDE_3] * 6),
    (64, True, [SMALL] * 2 + [WIDE_3] + [WIDE] * 3),
    (128, False, [SQUARE] * 2 + [LONG_3] * 3 + [LONG]),
    (128, True, [SQUARE] * 4 + [LONG] * 2),
    (256, False, [TURNS] * 3 + [NO_TURNS] * 3),
    (256, True, [NO_TURNS, TURNS] + [NO_TURNS] * 4),
]


def tile_of(problem: Problem, gpu: Device) -> Tile:
    v = plan(problem, gpu).variant
    assert v.kernel == "fa3_wgmma"
    assert v.warps == v.bm // 16 + 4
    return v.bm, v.bn, v.stages, v.blocks_per_sm, v.ping_pong


@pytest.mark.parametrize("gpu", HOPPER, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "causal", "expected"), STANDARD)
def test_many_tokens(
    gpu: Device, dtype: str, head_dim: int, causal: bool, expected: list[Tile]
) -> None:
    for power, tile in enumerate(expected):
        seq = 512 << power
        shape = (16384 // seq, 2048 // head_dim, seq, head_dim)
        problem = Problem.of_shapes(shape, shape, shape, dtype=dtype, causal=causal)
        assert tile_of(problem, gpu) == tile, seq


#: Sequence length, query heads (four to a K/V head), causal, and microseconds on an H200 of tiles
#: of 64 x 64, 128 x 128 and 192 x 80, at head dim 128.
SMALL_GRIDS = [
    *((1024, 1, True, 12.6, 15.1, 18.8), (1024, 4, True, 12.8, 15.3, 19.1)),
    *((1024, 16, True, 15.1, 16.1, 19.9), (1024, 32, True, 25.4, 24.8, 29.7)),
    *((1024, 64, True, 41.6, 38.4, 46.3), (512, 8, True, 8.5, 10.5, 13.1)),
    *((512, 32, True, 10.2, 11.2, 13.7), (2048, 8, True, 25.1, 25.8, 34.2)),
    *((2048, 32, True, 67.9, 63.0, 63.8), (256, 32, True, 6.9, 8.5, 10.5)),
    *((1024, 1, False, 12.4, 14.7, 19.0), (1024, 16, False, 16.7, 16.1, 20.2)),
    *((1024, 32, False, 29.5, 27.6, 36.5), (1024, 64, False, 59.1, 52.9, 56.0)),
    *((512, 32, False, 11.1, 11.1, 13.8), (2048, 8, False, 28.5, 26.4, 34.3)),
    *((2048, 32, False, 114.8, 101.7, 108.8), (256, 32, False, 6.7, 8.2, 10.5)),
]


@pytest.mark.parametrize(("seq", "heads", "causal", "by_64", "by_128", "by_192"), SMALL_GRIDS)
def test_few_tiles(
    seq: int, heads: int, causal: bool, by_64: float, by_128: float, by_192: float
) -> None:
    kv = (1, max(1, heads // 4), seq, 128)
    problem = Problem.of_shapes((1, heads, seq, 128), kv, kv, dtype="bfloat16", causal=causal)
    measured = {64: by_64, 128: by_128, 192: by_192}
    bm = tile_of(problem, H200)[0]
    assert measured[bm] <= 1.01 * min(measured.values())


def test_rows_that_a_tile_has_and_the_problem_has_not() -> None:
    """Of 197 and of 128 rows, tiles of 192 compute 384 and 192."""
    for heads, seq, head_dim in ((64 * 12, 197, 64), (64 * 12, 128, 32), (32 * 12, 128, 64)):
        shape = (1, heads, seq, head_dim)
        problem = Problem.of_shapes(shape, shape, shape, dtype="bfloat16")
        assert tile_of(problem, H200) == SMALL


@pytest.mark.parametrize("head_dims", all_head_dims("fa3_wgmma", H200))
@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_keys_has_tiles(head_dims: tuple[int, int], causal: bool) -> None:
    found = tiles("fa3_wgmma", head_dims, H200)
    for keys in (1, 512, 513, 1024, 1025, 2048, 2049, 8192, 8193, 2**31 - 257):
        costs = [t.cost for t in found if keys in (t.causal if causal else t.full)]
        assert costs.count(1.0) >= 1
        assert len(costs) >= 2
    for tile in found:
        assert tile.cost is not None
        assert tile.cost >= 1


def test_where_nothing_was_measured_the_first_tile_is_for_many_rows() -> None:
    gpu = device.named("a100")
    for kernel in ("fa2_mma", "fa2_fp32"):
        for head_dims in all_head_dims(kernel, gpu):
            long, *short = tiles(kernel, head_dims, gpu)
            assert long.cost is None
            dtype = KERNELS[kernel].dtypes[0]
            for q, expected in (
                ((1, 8 * gpu.sm_count, 1000, head_dims[0]), long.shape),
                ((1, gpu.sm_count, 64, head_dims[0]), [*short, long][0].shape),
                ((1, 1, 1000, head_dims[0]), [*short, long][0].shape),
            ):
                v = (*q[:3], head_dims[1])
                variant = plan(Problem.of_shapes(q, q, v, dtype=dtype), gpu, kernel).variant
                assert TileShape(*variant[4:10]) == expected


# --- the busiest multiprocessor ---

sizes = st.integers(1, 2000)


def lengths(rows: int, keys: int, bm: int, bn: int, causal: bool) -> list[int]:
    """Return the keys that each row tile of a head computes, longest first."""
    last_rows = (min(rows, (i + 1) * bm) - 1 for i in range(-(-rows // bm)))
    seen = [min(keys, row + 1 + keys - rows) if causal else keys for row in last_rows]
    return sorted((max(1, -(-n // bn)) * bn for n in seen), reverse=True)


@given(st.integers(0, 500), sizes, sizes, st.sampled_from([64, 128, 192]), st.integers(1, 200))
def test_busiest_without_a_mask(heads: int, rows: int, keys: int, bm: int, sm_count: int) -> None:
    times = lengths(rows, keys, bm, 80, causal=False) * heads
    per_wave = [times[i] for i in range(0, len(times), sm_count)]
    assert busiest(heads, rows, keys, bm, 80, sm_count) == bm * sum(per_wave)


@given(
    st.integers(1, 300),
    sizes,
    st.integers(0, 2000),
    st.sampled_from([(64, 64), (128, 128), (192, 80), (192, 128)]),
    st.integers(1, 200),
)
def test_busiest_with_a_mask(
    heads: int, rows: int, more: int, tile: tuple[int, int], sm_count: int
) -> None:
    """As if each multiprocessor took the longest tile that is left: roughly, in closed form."""
    (bm, bn), keys = tile, rows + more
    times = sorted(lengths(rows, keys, bm, bn, causal=True) * heads, reverse=True)
    busy = [0] * sm_count
    for time in times:
        least = min(range(sm_count), key=busy.__getitem__)
        busy[least] += time
    found = busiest_causal(heads, rows, keys, bm, bn, math.gcd(bm, bn), sm_count) / bm
    assert 0.8 * max(busy) - bn <= found <= 1.25 * max(busy) + bn


def test_no_tiles() -> None:
    assert busiest(0, 100, 100, 64, 64, 132) == 0
    assert busiest_causal(0, 100, 100, 64, 64, 64, 132) == 0
    assert busiest_causal(10, 0, 100, 64, 64, 64, 132) == 0


def test_a_plan_takes_microseconds() -> None:
    """A call whose lengths are new makes one: it takes no longer than a few lines of Python."""

    def unit() -> str:
        return "-".join(str(n) for n in range(100))

    numbers = itertools.count(500)

    def planned() -> Any:
        shape = (1, 32, 8, next(numbers), 4096, 128, 128)
        return plan(Problem("bfloat16", *shape, True, 0.1), H200)

    planned()
    times = [min(timeit.repeat(f, number=200, repeat=20)) for f in (planned, unit)]
    assert times[0] < 4 * times[1]
