"""rules.py and costs.py: which variant a problem takes, and that it is among the fastest."""

from __future__ import annotations

import itertools
import json
import math
import sys
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exhaustive import exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st

from cufa import device
from cufa.compiler import nvrtc
from cufa.device import Device
from cufa.features import parse
from cufa.features.causal import Causal
from cufa.features.expression.tracing import trace
from cufa.features.softcap import Softcap
from cufa.features.window import Window
from cufa.planner import rules
from cufa.planner.plan import plan_tiles
from cufa.problem.problem import Problem
from cufa.specs import KERNELS
from cufa.specs.costs import Copies, Cost, Work, copies, memory_us, with_memory, work
from cufa.specs.hopper_costs import COSTS
from cufa.specs.kernel_spec import TileShape

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
    v = plan_tiles(problem, gpu).variant
    assert v.kernel == "fa3_wgmma"
    assert v.warps == v.bm // 16 + 4
    return v.bm, v.bn, v.stages, v.blocks_per_sm, v.ping_pong


def losses(rows: list[dict[str, Any]], gpu: Device) -> list[float]:
    """Return the planned variant's measured time over that of the fastest, for each row.

    Not where the row's run tried no such variant.
    """
    tried: dict[tuple[int, cost_fit.Key], set[str]] = {}
    for row in rows:
        tried.setdefault((row["seed"], cost_fit.key_of(row, gpu)), set()).update(row["us"])
    found = []
    for row in rows:
        cell = Cell(**{name: row[name] for name in Cell._fields})
        v = plan_tiles(cell.problem, gpu).variant
        shape = TileShape(*(getattr(v, field) for field in TileShape._fields))
        fastest, name = min(row["us"].values()), cost_fit.name_of(shape)
        if name in tried[row["seed"], cost_fit.key_of(row, gpu)]:
            found.append(row["us"].get(name, cost_fit.LEFT_OUT * fastest) / fastest)
    return found


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


@pytest.mark.parametrize("gpu", HOPPER, ids=lambda gpu: gpu.name)
def test_little_is_lost_to_the_fastest_of_all_variants(gpu: Device) -> None:
    """In the problems that costs were found from."""
    found = losses(RESULT["rows"], gpu)
    assert mean(found) < 1.013
    assert sorted(found)[-len(found) // 80] < 1.12


def test_many_tokens() -> None:
    """The standard table's problems, of usual head dims."""
    rows = [
        row
        for row in RESULT["rows"]
        if row["b"] * row["sq"] == 16384
        and row["hq"] * row["d"] == 2048
        and row["d"] in (64, 128, 256)
    ]
    assert len(rows) > 20
    found = losses(rows, H200)
    assert mean(found) < 1.01
    assert max(found) < 1.05


def test_costs_are_those_of_the_results() -> None:
    """As far as digits are written; the module is not edited by hand."""
    key = 192, 192, True  # of which none spills
    found = cost_fit.costs_of(cost_fit.by_key(RESULT["rows"], H200)[key], H200)[key]
    assert set(found) == set(COSTS[key])
    for shape, cost in found.items():
        for x, y in zip(_flat(cost), _flat(COSTS[key][shape]), strict=True):
            assert x == pytest.approx(y, rel=5e-3, abs=1e-5)


def test_what_spills_is_not_chosen() -> None:
    rows = [row for row in RESULT["rows"] if (row["d"], row["causal"]) == (256, True)]
    (key,) = cost_fit.by_key(rows, H200)
    spilling = next(iter(COSTS[key]))
    found = cost_fit.costs_of(rows, H200, lambda key, shape: shape != spilling)
    assert found[key]
    assert spilling not in found[key]


def test_problems_that_costs_were_not_found_from() -> None:
    """Costs of three quarters of them choose well for the others, of all variants."""
    rows = [row for row in RESULT["rows"] if (row["d"], row["causal"]) == (128, True)]
    others = rows[3::4]
    costs = cost_fit.fitted([row for i, row in enumerate(rows) if i % 4 != 3], H200)
    found = cost_fit.forecasts(others, costs, H200)
    assert mean([each.loss() for each in found]) < 1.03


def _flat(cost: Cost) -> list[float]:
    return [*cost[:2], *cost.keys, *cost[3:]]


def test_rows_that_a_tile_has_and_the_problem_has_not() -> None:
    """Tiles of 192 rows compute 384 of 197 rows, and 192 of 128."""
    for heads, seq, head_dim in ((64 * 12, 197, 64), (64 * 12, 128, 32), (32 * 12, 128, 64)):
        shape = (1, heads, seq, head_dim)
        problem = Problem.of_shapes(shape, shape, shape, dtype="bfloat16")
        assert tile_of(problem, H200)[0] < 192


def test_all_tiles_of_hopper_have_costs() -> None:
    for d, dv in KERNELS["fa3_wgmma"].head_dims(H200):
        both = [COSTS[d, dv, causal] for causal in (False, True)]
        assert set().union(*both) == set(KERNELS["fa3_wgmma"].tiles(H200, (d, dv)))
        for shape, cost in (item for found in both for item in found.items()):
            assert len(cost.keys) == shape.blocks_per_sm
            assert min(_flat(cost)) >= 0


def test_where_nothing_was_measured_the_first_tile_is_for_many_rows() -> None:
    gpu = device.named("a100")
    for kernel in ("fa2_mma", "fa2_fp32"):
        for head_dims in KERNELS[kernel].head_dims(gpu):
            long, *short = KERNELS[kernel].tiles(gpu, head_dims)
            assert not KERNELS[kernel].costs
            dtype = KERNELS[kernel].dtypes[0]
            for q, expected in (
                ((1, 8 * gpu.sm_count, 1000, head_dims[0]), long),
                ((1, gpu.sm_count, 64, head_dims[0]), [*short, long][0]),
                ((1, 1, 1000, head_dims[0]), [*short, long][0]),
            ):
                v = (*q[:3], head_dims[1])
                variant = plan_tiles(Problem.of_shapes(q, q, v, dtype=dtype), gpu, kernel).variant
                assert TileShape(*variant[4:10]) == expected


# --- time from costs ---

WHOLE_LINES = Copies(256, ragged=False, boxes=0, read=128)

sizes = st.integers(1, 2000)
tile_sizes = st.sampled_from([(64, 64, 1), (64, 64, 3), (128, 128, 2), (192, 80, 1)])


def lengths(rows: int, keys: int, bm: int, bn: int, causal: bool) -> list[int]:
    """Return the tiles of keys that each row tile of a head has, longest first; 0 if it sees none.

    With a causal mask those whose end is near a tile's are counted as it is.
    """
    last_rows = (min(rows, (i + 1) * bm) - 1 for i in range(-(-rows // bm)))
    seen = [min(keys, row + 1 + keys - rows) if causal else keys for row in last_rows]
    return sorted((max(0, -(-n // bn)) for n in seen), reverse=True)


@given(st.integers(0, 500), sizes, sizes, tile_sizes, st.integers(1, 200))
def test_equal_tiles_come_in_waves(
    heads: int, rows: int, keys: int, tile: tuple[int, int, int], sm_count: int
) -> None:
    """Each multiprocessor has the same places, and the first has all that some of them have."""
    found = work(heads, rows, keys, 1, False, 0.0, WHOLE_LINES, tile, sm_count)
    number = heads * -(-rows // tile[0])
    in_places = [len(range(i * sm_count, number, sm_count * tile[2])) for i in range(tile[2])]
    assert found.waves == in_places[0]
    assert list(found.keys) == pytest.approx([n * -(-keys // tile[1]) for n in in_places])
    assert found.blank == 0


@settings(deadline=None)  # places are drawn one by one
@given(st.integers(1, 300), sizes, st.integers(-1000, 2000), tile_sizes, st.integers(1, 200))
def test_causal_tiles_come_longest_first(
    heads: int, rows: int, more: int, tile: tuple[int, int, int], sm_count: int
) -> None:
    """As places draw them: roughly, in closed form."""
    (bm, bn, blocks), keys = tile, max(1, rows + more)
    found = work(heads, rows, keys, 1, True, 0.0, WHOLE_LINES, tile, sm_count)
    drawn = [n for n in sorted(lengths(rows, keys, bm, bn, causal=True) * heads)[::-1] if n]
    places = [0.0] * (sm_count * blocks)
    for length in drawn:
        places[min(range(len(places)), key=places.__getitem__)] += length
    if len(drawn) <= len(places) or len(set(drawn)) == 1:
        busiest = [places[i * sm_count] for i in range(blocks)]
    else:
        busiest = [max(places)] * blocks
    for number, exact in zip(found.keys, busiest, strict=True):
        assert abs(number - exact) <= 0.4 * exact + 2
    blank = lengths(rows, keys, bm, bn, causal=True).count(0) * heads
    assert found.blank == pytest.approx(blank / sm_count)


def test_a_cost_is_the_sum_of_its_parts() -> None:
    """A second block on a multiprocessor makes a tile of keys longer, by less than it took."""
    cost = Cost(2.0, 3.0, (0.5, 0.3), 0.2, 0.4, 0.5, 0.6, 0.7)
    nothing = Work(1, (10.0, 0.0), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert cost.of(nothing) == with_memory(2 + 3 + 5, 0.0)
    assert cost.of(nothing._replace(keys=(10.0, 10.0))) == with_memory(2 + 3 + 8, 0.0)
    more = Work(2, (20.0, 10.0), 7.0, 5.0, 2.0, 3.0, 4.0, 5.0)
    total = 2 + 6 + 13 + 1 + 0.8 + 1.5 + 2.4 + 3.5
    assert cost.of(more) == pytest.approx(with_memory(total, 7.0))


@given(st.floats(1.0, 1e6), st.floats(0.0, 1e6))
def test_time_with_memory(us: float, megabytes: float) -> None:
    """No less than either, and little more than the longer one."""
    memory = memory_us(megabytes)
    found = with_memory(us, megabytes)
    assert max(us, memory) * (1 - 1e-12) <= found <= 1.27 * max(us, memory)
    assert with_memory(1e3 * memory, megabytes) == pytest.approx(1e3 * memory)


def test_what_is_not_looked_at_is_no_faster(rng: np.random.Generator) -> None:
    """The least that each variant takes is no more than what it takes."""
    causal = (Causal(),)
    masks = (
        (),
        causal,
        (Causal(), Window(127, None)),
        (Causal("top-left"),),
    )
    for _ in range(600):
        hk, group, d = (int(rng.choice(n)) for n in ([1, 2, 5], [1, 2, 7, 8], [64, 72, 128, 256]))
        b, sq, sk = int(rng.integers(1, 64)), *(int(2 ** rng.uniform(3, 13)) for _ in range(2))
        mask = masks[int(rng.integers(4))]
        if mask != causal or sq <= sk:  # remembered in steps
            sq, sk = (-(-n // 64) * 64 for n in (sq, sk))
        kv = (b, hk, sk, d)
        problem = Problem.of_shapes((b, hk * group, sq, d), kv, kv, dtype="bfloat16")
        problem = problem._replace(features=mask)
        found = rules.choice("fa3_wgmma", "bfloat16", (d, d), problem.score, H200)
        _, us = found.of(problem)
        assert us == pytest.approx(min(found.times(problem).values())), problem


def test_only_bottom_right_masks_hide_rows() -> None:
    """Queries are more than keys; with another mask it takes longer, as they see keys."""
    causal = Problem.of_shapes((2, 32, 8192, 128), *[(2, 8, 1024, 128)] * 2, dtype="bfloat16")
    causal = causal.having(Causal())
    us = {}
    for name, problem in (
        ("causal", causal),
        ("top-left", causal.having(Causal("top-left"))),
        ("left", causal._replace(features=(Window(50, None),))),
        ("right", causal._replace(features=(Window(None, 4096),))),
    ):
        us[name] = min(rules.times(problem, H200, "fa3_wgmma").values())
    flops = 4 * 2 * 32 * 8192 * 1024 * 128
    assert us["causal"] < 150
    assert all(flops / us[name] < 800e6 for name in ("top-left", "left", "right"))


def test_queries_that_are_not_read() -> None:
    """Rows of tiles none of whose rows sees a key: the first three tiles of 512 rows."""
    found = work(10, 512, 128, 1, True, 1.0, WHOLE_LINES, (128, 64, 1), 5)
    assert found.blank == 3 * 10 / 5
    assert found.megabytes == pytest.approx(1.0 - 3 * 10 * 128 * 128e-6)


def test_rows_of_half_sectors() -> None:
    """TMA takes longer for them, in each part of a row, and for those that are no whole lines."""
    assert [copies((d, d), (64, 64)).boxes for d in (40, 44, 48, 56, 60, 64)] == [1, 0, 0, 1, 0, 0]
    assert [copies((d, d), (96, 96)).boxes for d in (72, 80, 96)] == [3, 0, 0]
    assert [copies((d, d), (128, 128)).ragged for d in (104, 112, 128)] == [False, True, False]
    assert copies((192, 128), (192, 128)) == Copies(640, ragged=False, boxes=0, read=384)
    tile = 64, 32, 2
    plain, lines, parts = (
        work(10, 128, 64, 1, False, 0.0, Copies(256, ragged, boxes, 128), tile, 5)
        for ragged, boxes in ((False, 0), (True, 0), (False, 3))
    )
    assert plain == lines._replace(ragged=0.0) == parts._replace(unaligned=0.0)
    rows = 20 * (2 * 64 + 2 * 2 * 32)  # Q and O, K and V
    assert lines.ragged == pytest.approx(rows / 5 / 1000)
    assert parts.unaligned == pytest.approx(3 * rows / 5 / 1000)
    assert plain.fetched == pytest.approx(20 * 2 * 32 * 256 / 5 / 1e6)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("reads", "options"),
    [
        (("BiasBfloat16",), {"softcap": 9.0}),
        (("BiasBfloat16", "Mask"), {}),
        (("BiasBfloat16",), {"dropout_p": 0.1}),
        (("Alibi",), {"softcap": 9.0, "dropout_p": 0.1}),
        (("Mask",), {"softcap": 9.0, "dropout_p": 0.1}),
    ],
    ids=str,
)
@exhaustive("fa3_wgmma", one_in=2)
def test_scores_of_many_parts_have_registers(
    head_dim: int, reads: tuple[str, ...], options: dict[str, Any]
) -> None:
    pytest.importorskip("cupy")
    shape = (4, 2048 // head_dim, 4096, head_dim)
    plain = Problem.of_shapes(shape, shape, shape, dtype="bfloat16")
    problem = plain.reading(*reads).having(*parse(options))
    compiled = nvrtc.compile_variant(plan_tiles(problem, H200).variant, "sm_90a")
    assert compiled.spill_bytes < 128


def test_who_takes_no_turns() -> None:
    """A window's tiles have few keys."""
    found = {}
    for head_dim in (64, 128):
        shape = (2, 2048 // head_dim, 8192, head_dim)
        plain = Problem.of_shapes(shape, shape, shape, dtype="bfloat16", causal=True)
        for name, problem in (
            ("window", plain.having(Window(4095, None))),
            ("softcap", plain.having(Softcap(30.0))),
        ):
            found[name, head_dim] = plan_tiles(problem, H200).variant.ping_pong
    assert [name for name, turns in found.items() if not turns] == [("window", 128)]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("left", [1023, 1024])
def test_tiles_of_a_window_fit_its_keys(head_dim: int, left: int) -> None:
    """Those that tiles of rows begin at visit no more than its keys."""
    shape = (1, 2048 // head_dim, 16384, head_dim)
    problem = Problem.of_shapes(shape, shape, shape, dtype="bfloat16", causal=True)
    found = plan_tiles(problem.having(Window(left, None)), H200).variant
    assert found.bm == found.bn


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_beside_a_map_are_within_its_own(head_dim: int, causal: bool) -> None:
    """Or made of some of them, whatever powers of two these have."""
    (mask_mod,) = trace(None, lambda b, h, i, j: i // 300 == j // 300).parts
    shape = (2, 2048 // head_dim, 8192, head_dim)
    problem = Problem.of_shapes(shape, shape, shape, dtype="bfloat16", causal=causal)
    mapped = plan_tiles(problem.reading("Blocks", mask_mod), H200).variant
    assert 128 % mapped.bm == 128 % mapped.bn == 0


def test_lines_need_no_registers() -> None:
    """As ALiBi of one's own, they run in the tiles of ALiBi."""
    shape = (2, 32, 8192, 64)
    problem = Problem.of_shapes(shape, shape, shape, dtype="bfloat16", causal=True)
    tiles = []
    for score_mod in (lambda s, b, h, i, j: s - abs(i - j), lambda s, b, h, i, j: s - np.sqrt(j)):
        found = plan_tiles(problem.reading(*trace(score_mod, None).parts), H200).variant
        tiles.append((found.bm, found.bn))
    assert tiles[0] == (192, 128)
    assert math.prod(tiles[1]) < math.prod(tiles[0])


@pytest.mark.parametrize("causal", [False, True])
def test_no_tiles(causal: bool) -> None:
    for heads, rows in ((0, 100), (10, 0)):
        found = work(heads, rows, 100, 1, causal, 0.0, WHOLE_LINES, (64, 64, 2), 132)
        assert found == Work(0, (0.0, 0.0), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_a_plan_takes_microseconds() -> None:
    """A call whose lengths are new makes one: it takes no longer than a few lines of Python."""

    def unit() -> str:
        return "-".join(str(n) for n in range(100))

    numbers = itertools.count(500)

    def planned() -> Any:
        shape = (1, 32, 8, next(numbers), 4096, 128, 128)
        return plan_tiles(Problem("bfloat16", *shape, 0.1, (Causal(),)), H200)

    planned()
    times = [min(timeit.repeat(f, number=200, repeat=20)) for f in (planned, unit)]
    assert times[0] < 10 * times[1]


def test_the_table_is_written_as_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cost_fit, "costs_of", lambda *_: COSTS)
    (tmp_path / "cufa" / "specs").mkdir(parents=True)
    path = cost_fit.write({**RESULT, "bench": "costs"}, tmp_path)
    assert path.read_text() == (ROOT / "cufa" / "specs" / "hopper_costs.csv").read_text()
