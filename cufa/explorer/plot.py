"""Figures of an exploration, drawn without a display."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cufa import optional
from cufa.explorer.result import Findings, Row
from cufa.explorer.table import flags, problem_text
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which also colour-blind readers tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442")
_MARKERS = ("o", "s", "D", "P", "X", "v")
_BEST, _INK = "#d55e00", "#333333"
_SPREAD = 0.6
"""Width over which the variants of one tile are spread, where tiles are 1 apart."""

_Height = Callable[[Row], float]


def figure(findings: Findings) -> Figure:
    """Draw the findings: times and a roofline, or registers and occupancy without timings.

    ImportError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        needed = f"plots need matplotlib: {optional.install('explore')}"
        raise ImportError(f"{needed} ({error})") from error

    drawn = Figure(layout="constrained")
    FigureCanvasAgg(drawn)
    title = f"{problem_text(findings.problem)}  ({findings.device.name}, {findings.arch})"
    drawn.suptitle(title, fontsize=11, color=_INK)
    rows = [row for row in findings.rows if row.error is None]
    timed = [row for row in rows if row.median_us is not None]
    width = 4.5 + 0.3 * len({_tile(row.variant) for row in rows})
    if timed:
        drawn.set_size_inches(width + 4.5, 5.6)
        first, roofline = drawn.subplots(1, 2, width_ratios=(width, 4.5))
        _draw_tiles(first, findings, timed, "time of a call, us (less is better)", _microseconds)
        _plain_log(first.yaxis, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))
        _draw_roofline(roofline, findings, timed)
    else:
        drawn.set_size_inches(width, 7.0)
        first, lower = drawn.subplots(2, 1)
        _draw_tiles(first, findings, rows, "registers of a thread", lambda row: row.registers or 0)
        _draw_tiles(lower, findings, rows, "occupancy, %", lambda row: 100 * (row.occupancy or 0))
        lower.set_ylim(bottom=0)
    handles, labels = first.get_legend_handles_labels()
    if labels:
        column = 0.6 + 0.07 * max(map(len, labels))  # inches of a legend's column at 8 points
        columns = max(1, int(drawn.get_figwidth() / column))
        place: dict[str, Any] = {"loc": "outside lower center", "labelspacing": 0.9}
        drawn.legend(handles, labels, ncols=columns, fontsize=8, frameon=False, **place)
    return drawn


def _microseconds(row: Row) -> float:
    return row.median_us or 0.0


def _tile(variant: Variant) -> tuple[str, int, int, int, int]:
    return variant.kernel, variant.head_dim, variant.head_dim_v, variant.bm, variant.bn


def _look(variant: Variant) -> tuple[int, int, str]:
    """Return the numbers that colour and marker stand for."""
    return variant.stages, variant.warps, flags(variant)


def _words(variant: Variant) -> str:
    v = variant
    return f"{v.bm}x{v.bn}, {v.stages} st., {v.warps} w. {flags(v)}".rstrip()


def _draw_tiles(axes: Axes, findings: Findings, rows: list[Row], label: str, y: _Height) -> None:
    """Draw a point a variant: those of a tile next to each other, above the tile's name."""
    rows = sorted(rows, key=lambda row: (*_look(row.variant), row.variant.blocks_per_sm))
    tiles = sorted({_tile(row.variant) for row in rows})
    x: dict[Variant, float] = {}
    for place, tile in enumerate(tiles):
        group = [row.variant for row in rows if _tile(row.variant) == tile]
        for i, variant in enumerate(group):
            x[variant] = place + _SPREAD * ((i + 0.5) / len(group) - 0.5)

    def draw(some: list[Row], marker: str, **options: Any) -> None:
        axes.plot([x[row.variant] for row in some], [y(row) for row in some], marker, **options)

    stages = sorted({row.variant.stages for row in rows})
    markers = sorted({_look(row.variant)[1:] for row in rows})
    for look in dict.fromkeys(_look(row.variant) for row in rows):
        colour = _COLOURS[stages.index(look[0]) % len(_COLOURS)]
        marker = _MARKERS[markers.index(look[1:]) % len(_MARKERS)]
        name = f"{look[0]} stage{'s' * (look[0] > 1)}, {look[1]} warps"
        name = ", ".join(filter(None, (name, look[2])))
        alike = [row for row in rows if _look(row.variant) == look]
        draw(alike, marker, color=colour, ms=5.5, mec="white", mew=0.5, label=name)
    if y is _microseconds:
        halves = [y(row) * (row.spread or 0.0) / 2 for row in rows]
        places, heights = [x[row.variant] for row in rows], [y(row) for row in rows]
        axes.errorbar(places, heights, halves, fmt="none", ecolor="#999999", lw=0.8, zorder=1)
    spilled = [row for row in rows if row.spill_bytes]
    if spilled:
        draw(spilled, "o", color="white", ms=2.4)
        hole: dict[str, Any] = {"color": "#777777", "mfc": "white", "mew": 1.8, "ms": 4.5}
        axes.plot([], [], "o", label="with a hole: spills registers", **hole)
    for row in rows:
        if row.variant == findings.planned:
            draw([row], "o", ms=12, label=f"planned: {_words(row.variant)}", **_ring(_INK))
    best = findings.best
    if y is _microseconds and best is not None:
        name = f"best: {_words(best.variant)}, {y(best):.4g} us"
        draw([best], "o", ms=16, label=name, **_ring(_BEST))
        axes.axhline(y(best), color=_BEST, lw=0.8, ls=":", zorder=1)
    several = len({tile[:3] for tile in tiles}) > 1
    names = [f"{bm}x{bn}" + f" {kernel} {d}/{dv}" * several for kernel, d, dv, bm, bn in tiles]
    axes.set_xticks(range(len(tiles)), names, rotation=90)
    axes.set_xlim(-0.7, max(1, len(tiles)) - 0.3)
    _finish(axes, "tile, bm x bn", label)


def _draw_roofline(axes: Axes, findings: Findings, rows: list[Row]) -> None:
    """Draw each variant's speed under the ceilings, where they were measured."""
    best, ceilings = findings.best, findings.ceilings
    speeds = [row.tflops or 0.0 for row in rows]
    intensity = 1e3 * speeds[0] / (rows[0].gbs or 1.0)  # the same for all: that of the problem
    notes: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}
    axes.axvline(intensity, color="#999999", lw=0.8, ls=":", zorder=1)
    axes.plot([intensity] * len(rows), speeds, "_", ms=9, color=_COLOURS[0])
    if ceilings is not None:
        gbs, tflops = ceilings["read_gbs"], ceilings.get("gemm_tflops")
        ridge = intensity if tflops is None else tflops * 1e3 / gbs
        low, high = min(intensity, ridge) / 8, max(intensity, ridge) * 8
        roof = high * gbs / 1e3 if tflops is None else tflops
        xs = [low, roof * 1e3 / gbs, high]
        axes.plot(xs, [min(x * gbs / 1e3, roof) for x in xs], color=_INK, lw=1.8, zorder=2)
        axes.annotate(f"memory {gbs:.0f} GB/s", (low, low * gbs / 1e3), (10, 0), **notes)
        if tflops is not None:
            text = f"matrix product {tflops:.0f} TFLOP/s"
            axes.annotate(text, (high, tflops), (0, 8), ha="right", **notes)
    if best is not None:
        speed, share = best.tflops or 0.0, best.ceiling_fraction
        axes.plot([intensity], [speed], "o", ms=14, **_ring(_BEST))
        text = f"{speed:.3g} TFLOP/s"
        text += "" if share is None else f"\n{share:.0%} of the ceiling"
        axes.annotate(text, (intensity, speed), (12, -4), va="top", color=_BEST, **notes)
    _finish(axes, "operations a byte of Q, K, V and O", "TFLOP/s")
    _plain_log(axes.xaxis, (1.0,))
    _plain_log(axes.yaxis, (1.0, 2.0, 5.0))


def _ring(colour: str) -> dict[str, Any]:
    """Return the look of a ring around a point."""
    return {"mfc": "none", "mec": colour, "mew": 1.6, "clip_on": False, "zorder": 4}


def _finish(axes: Axes, x_label: str, y_label: str) -> None:
    """Name the axes, and remove frame lines that carry no information."""
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", which="both", alpha=0.25, lw=0.6)
    axes.tick_params(labelsize=8)


def _plain_log(axis: Any, steps: tuple[float, ...]) -> None:
    """Make an axis logarithmic, labelled at these steps of a decade without powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
