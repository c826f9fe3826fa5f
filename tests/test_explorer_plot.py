"""explorer/plot.py: figures with and without timings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import findings
import pytest
from findings import CEILINGS, compiled, timed

from cufa.explorer.exploration import Exploration
from cufa.explorer.result import Row
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

SHAPE = (2, 16, 8192, 128)
PROBLEM = Problem.of_shapes(SHAPE, SHAPE, SHAPE, dtype="bfloat16")
PLANNED = Variant("fa2_mma", "bfloat16", 128, 128, 128, 64, 2, 4, 2)

VARIANTS = [
    PLANNED._replace(bm=bm, bn=bn, stages=stages, warps=warps)
    for bm in (64, 128)
    for bn in (32, 64)
    for stages in (1, 2)
    for warps in (4, 8)
]
STATIC = [
    compiled(variant, registers=100 + i, spill_bytes=8 * (i % 2))
    for i, variant in enumerate(VARIANTS)
]
TIMED = [
    timed(row.variant, 1000.0 + 50 * i, registers=row.registers, spill_bytes=row.spill_bytes)
    for i, row in enumerate(STATIC)
]
BROKEN = Row(PLANNED._replace(bn=65), error="bn must be a multiple of 16")


def exploration(rows: list[Row], ceilings: dict[str, float] | None = None) -> Exploration:
    return findings.exploration(PROBLEM, rows, PLANNED, ceilings)


@pytest.fixture(autouse=True)
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib")


def texts(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(lambda x: hasattr(x, "get_text")))


@pytest.mark.parametrize(
    "found",
    [
        exploration([*STATIC, BROKEN]),
        exploration([*TIMED, BROKEN], CEILINGS),
        exploration(TIMED, {"read_gbs": 4000.0, "copy_gbs": 3900.0}),
        exploration(TIMED),
        exploration(TIMED[:1], CEILINGS),
        exploration([*TIMED[:3], *STATIC[3:]], CEILINGS),
        exploration([BROKEN]),
        exploration([]),
    ],
    ids=[
        "static",
        "timed",
        "no cuBLAS",
        "no ceilings",
        "one",
        "interrupted",
        "only errors",
        "nothing",
    ],
)
@pytest.mark.filterwarnings("error")
def test_writes_a_picture(found: Exploration, tmp_path: Path) -> None:
    figure = found.plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "bfloat16, batch 2, heads 16, seq 8192" in texts(figure)


def test_without_timings_registers_and_occupancy() -> None:
    figure = exploration(STATIC).plot()
    upper, lower = figure.axes
    assert (upper.get_ylabel(), lower.get_ylabel()) == ("registers of a thread", "occupancy, %")
    labels = [label.get_text() for label in lower.get_xticklabels()]
    assert labels == ["64x32", "64x64", "128x32", "128x64"]
    shown = texts(figure)
    assert "planned: 128x64, 2 st., 4 w." in shown
    assert "1 stage, 4 warps" in shown
    assert "spills registers" in shown


def test_with_timings_times_and_a_roofline() -> None:
    figure = exploration(TIMED, CEILINGS).plot()
    left, right = figure.axes
    assert left.get_ylabel().startswith("time of a call")
    assert right.get_xscale() == right.get_yscale() == "log"
    shown = texts(figure)
    assert "best: 64x32, 1 st., 4 w., 1000 us" in shown
    assert "planned: 128x64, 2 st., 4 w." in shown
    assert "memory 4000 GB/s" in shown
    assert "matrix product 700 TFLOP/s" in shown
    assert "50% of the ceiling" in shown


def test_a_switch_has_a_marker_and_a_label_of_its_own() -> None:
    others = [row._replace(variant=row.variant._replace(ping_pong=True)) for row in STATIC]
    figure = exploration([*STATIC, *others]).plot()
    shown = texts(figure)
    assert "2 stages, 8 warps\n" in shown
    assert "2 stages, 8 warps, ping_pong\n" in shown
    lines: list[Any] = list(figure.axes[0].get_lines())
    looks = {(line.get_color(), line.get_marker()) for line in lines if line.get_ms() == 5.5}
    assert len(looks) == 2 * 2 * 2  # stages, warps, ping_pong
    places = [x for line in lines if line.get_ms() == 5.5 for x in line.get_xdata()]
    assert len(set(places)) == len(places) == 2 * len(STATIC)


def test_the_legend_fits_the_figure() -> None:
    """Also with many looks, which a narrow figure has to stack."""
    others = [row._replace(variant=row.variant._replace(ping_pong=True)) for row in TIMED]
    for rows in ([*STATIC[:8]], [*STATIC, *others], [*TIMED, *others]):
        figure = exploration(rows, CEILINGS).plot()
        figure.canvas.draw()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_tiles_of_several_kernels_are_told_apart() -> None:
    others = [row._replace(variant=row.variant._replace(head_dim=144)) for row in STATIC]
    labels = [
        t.get_text() for t in exploration([*STATIC, *others]).plot().axes[1].get_xticklabels()
    ]
    assert "64x32 fa2_mma 128/128" in labels
    assert "64x32 fa2_mma 144/128" in labels


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[explore\]" in a clone'):
        exploration(STATIC).plot()
