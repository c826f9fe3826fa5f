"""rules.py and costs.py: which variant a problem takes, and that it is among the fastest."""

from __future__ import annotations

import itertools
import json
import math
import sys
import timeit
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cufa import device
from cufa.device import Device
from cufa.kernel import KERNELS
from cufa.planner.costs import Cost
from cufa.planner.hopper_costs import COSTS
from cufa.planner.plan import plan
from cufa.planner.tiles import TileShape, all_head_dims, tiles
from cufa.problem import Problem

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import cost_fit  # noqa: E402
from benchmarks.cells import Cell  # noqa: E402

HOPPER = [device.named("h100"), device.named("h200")]
H200 = device.named("h200")

RESULT = json.loads((ROOT / "docs" / "benchmarks" / "h200-costs.json").read_text())

#: bm, bn, stages, blocks_per_sm and ping_pong.
Tile = tuple[int, int, int, int, bool]


def tile_of(problem: Problem, gpu: Device) -> Tile:
    v = plan(problem, gpu).variant
    assert v.kernel == "fa3_wgmma"
    assert v.warps == v.bm // 16 + 4
    return v.bm, v.bn, v.stages, v.blocks_per_sm, v.ping_pong


def losses(rows: list[dict[str, Any]], gpu: Device) -> list[float]:
    """Return the planned variant's measured time over that of the fastest, for each row."""
    found = []
    for row in rows:
        cell = Cell(**{name: row[name] for name in Cell._fields})
        v = plan(cell.problem, gpu).variant
        numbers = v.bm, v.bn, v.stages, v.warps, v.blocks_per_sm, int(v.ping_pong)
        planned = row["us"][" ".join(map(str, numbers))]
        found.append(planned / min(row["us"].values()))
    return found


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


@pytest.mark.parametrize("gpu", HOPPER, ids=lambda gpu: gpu.name)
def test_little_is_lost_to_the_fastest_variant(gpu: Device) -> None:
    """Of those that can be chosen, in the problems that costs were found from."""
    found = losses(RESULT["rows"], gpu)
    assert mean(found) < 1.006
    assert sorted(found)[-6] < 1.12


def test_many_tokens() -> None:
    """The standard table's problems, of usual head dims."""
    rows = [
        row
        for row in RESULT["rows"]
        if row["b"] * row["sq"] == 16384
        and row["hq"] * row["d"] == 2048
        and row["d"] in (64, 128, 256)
    ]
    assert len(rows) == 36
    found = losses(rows, H200)
    assert mean(found) < 1.002
    assert max(found) < 1.01


def test_costs_are_those_of_the_results() -> None:
    """As far as digits are written; the module is not edited by hand."""
    rows = [row for row in RESULT["rows"] if (row["d"], row["causal"]) == (64, True)]
    ((key, found),) = cost_fit.costs_of(rows, H200.sm_count).items()
    for shape, cost in found.items():
        for x, y in zip(_flat(cost), _flat(COSTS[key][shape]), strict=True):
            assert x == pytest.approx(y, rel=5e-3)


def test_problems_that_costs_were_not_found_from() -> None:
    """Costs of half of them choose well for the other half."""
    rows = [row for row in RESULT["rows"] if (row["d"], row["causal"]) == (128, False)]
    costs = cost_fit.costs_of(rows[::2], H200.sm_count)
    found = cost_fit.forecasts(rows[1::2], costs, H200.sm_count)
    assert mean([each.loss for each in found]) < 1.01


def _flat(cost: Cost) -> list[float]:
    return [cost.launch, cost.tile, *cost.keys]


def test_rows_that_a_tile_has_and_the_problem_has_not() -> None:
    """Of 197 and of 128 rows, tiles of 192 compute 384 and 192."""
    for heads, seq, head_dim in ((64 * 12, 197, 64), (64 * 12, 128, 32), (32 * 12, 128, 64)):
        shape = (1, heads, seq, head_dim)
        problem = Problem.of_shapes(shape, shape, shape, dtype="bfloat16")
        assert tile_of(problem, H200)[0] == 64


@pytest.mark.parametrize("causal", [False, True])
def test_all_tiles_of_hopper_have_costs(causal: bool) -> None:
    for head_dims in all_head_dims("fa3_wgmma", H200):
        found = COSTS[("fa3_wgmma", *head_dims, causal)]
        assert set(found) == set(tiles("fa3_wgmma", head_dims, H200))
        for shape, cost in found.items():
            assert len(cost.keys) == shape.blocks_per_sm
            assert list(cost.keys) == sorted(cost.keys)


def test_where_nothing_was_measured_the_first_tile_is_for_many_rows() -> None:
    gpu = device.named("a100")
    for kernel in ("fa2_mma", "fa2_fp32"):
        for head_dims in all_head_dims(kernel, gpu):
            long, *short = tiles(kernel, head_dims, gpu)
            assert (kernel, *head_dims, False) not in COSTS
            dtype = KERNELS[kernel].dtypes[0]
            for q, expected in (
                ((1, 8 * gpu.sm_count, 1000, head_dims[0]), long),
                ((1, gpu.sm_count, 64, head_dims[0]), [*short, long][0]),
                ((1, 1, 1000, head_dims[0]), [*short, long][0]),
            ):
                v = (*q[:3], head_dims[1])
                variant = plan(Problem.of_shapes(q, q, v, dtype=dtype), gpu, kernel).variant
                assert TileShape(*variant[4:10]) == expected


# --- time from costs ---

sizes = st.integers(1, 2000)


def lengths(rows: int, keys: int, bm: int, bn: int, causal: bool) -> list[int]:
    """Return the tiles of keys that each row tile of a head computes, longest first."""
    last_rows = (min(rows, (i + 1) * bm) - 1 for i in range(-(-rows // bm)))
    seen = [min(keys, row + 1 + keys - rows) if causal else keys for row in last_rows]
    return sorted((max(1, -(-n // bn)) for n in seen), reverse=True)


@given(st.integers(0, 500), sizes, sizes, st.sampled_from([64, 128, 192]), st.integers(1, 200))
def test_equal_tiles_come_in_waves(
    heads: int, rows: int, keys: int, bm: int, sm_count: int
) -> None:
    times = [3.0 + 0.5 * n for n in lengths(rows, keys, bm, 80, causal=False)] * heads
    per_wave = [times[i] for i in range(0, len(times), sm_count)]
    found = Cost(2.0, 3.0, (0.5,)).equal_tiles(heads, rows, keys, bm, 80, sm_count)
    assert found == pytest.approx(2 + sum(per_wave))


def test_blocks_that_share_a_multiprocessor() -> None:
    """Two take longer than one, and less than one after the other."""
    cost = Cost(2.0, 3.0, (0.5, 0.8))
    for tiles_of_each, time in ((1, 3 + 5), (2, 3 + 8), (3, 6 + 13), (4, 6 + 16)):
        found = cost.equal_tiles(10 * tiles_of_each, 64, 640, 64, 64, 10)
        assert found == pytest.approx(2 + time)


@given(
    st.integers(1, 300),
    sizes,
    st.integers(0, 2000),
    st.sampled_from([(64, 64), (128, 128), (192, 80), (192, 128)]),
    st.integers(1, 200),
)
def test_causal_tiles_come_longest_first(
    heads: int, rows: int, more: int, tile: tuple[int, int], sm_count: int
) -> None:
    """As if each multiprocessor took the longest tile that is left: roughly, in closed form."""
    (bm, bn), keys = tile, rows + more
    times = [1.0 + n for n in sorted(lengths(rows, keys, bm, bn, causal=True) * heads)[::-1]]
    busy = [0.0] * sm_count
    for time in times:
        least = min(range(sm_count), key=busy.__getitem__)
        busy[least] += time
    step = math.gcd(bm, bn)
    found = Cost(0.0, 1.0, (1.0,)).causal_tiles(heads, rows, keys, bm, bn, step, sm_count)
    assert 0.8 * max(busy) - 1 <= found <= 1.25 * max(busy) + 1


def test_no_tiles() -> None:
    cost = Cost(2.0, 3.0, (0.5, 0.8))
    assert cost.equal_tiles(0, 100, 100, 64, 64, 132) == 2
    assert cost.causal_tiles(0, 100, 100, 64, 64, 64, 132) == 2
    assert cost.causal_tiles(10, 0, 100, 64, 64, 64, 132) == 2


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
    assert times[0] < 5 * times[1]
