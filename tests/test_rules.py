"""rules.py: which variant a problem takes, and that it is the one measured as fastest."""

from __future__ import annotations

import itertools
import json
import math
import timeit
from pathlib import Path
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

TRIALS = Path(__file__).resolve().parents[1] / "docs" / "trials.json"

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


def small_grids() -> dict[tuple[int, int, bool], dict[int, float]]:
    """Return the measured microseconds of tiles at head dim 128, by bm, of each small grid."""
    found: dict[tuple[int, int, bool], dict[int, float]] = {}
    for row in json.loads(TRIALS.read_text())["rows"]:
        tile = row["contestant"].split()[0]
        if row["trial"] == "fa3_wgmma: tiles in small grids" and tile != "64x80":
            grid = found.setdefault((row["s"], row["heads"], row["causal"]), {})
            grid[int(tile.split("x")[0])] = row["value"]
    return found


@pytest.mark.parametrize(("grid", "measured"), small_grids().items())
def test_few_tiles(grid: tuple[int, int, bool], measured: dict[int, float]) -> None:
    seq, heads, causal = grid
    assert set(measured) == {64, 128, 192}
    kv = (1, max(1, heads // 4), seq, 128)
    problem = Problem.of_shapes((1, heads, seq, 128), kv, kv, dtype="bfloat16", causal=causal)
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
