"""Figures of an exploration, drawn without a display."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cufa import optional
from cufa.explorer.plot_style import (
    BEST,
    INK,
    Style,
    finish,
    legend_columns,
    points,
    ring,
    tile_name,
)
from cufa.explorer.result import Findings, Row
from cufa.explorer.table import problem_text
from cufa.explorer.work import flops, nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


def figure(found: Findings) -> Figure:
    """Draw what was found: times and a roofline, or registers and occupancy without timings.

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
    title = f"{problem_text(found.problem)}  ({found.device.name}, {found.arch})"
    drawn.suptitle(title, fontsize=11, color=INK)
    rows = [row for row in found.rows if row.error is None]
    timed = [row for row in rows if row.median_us is not None]
    axes = _measured(drawn, found, timed) if timed else _static(drawn, found, rows)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        drawn.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=legend_columns(labels, drawn.get_figwidth()),
            fontsize=8,
            frameon=False,
            labelspacing=0.9,
        )
    return drawn


def _static(drawn: Figure, found: Findings, rows: list[Row]) -> Axes:
    """Draw what is known without a GPU; return the axes whose legend holds for all."""
    style = Style(rows)
    drawn.set_size_inches(max(7.0, 2.0 + 0.32 * len(style.places)), 7.0)
    upper, lower = drawn.subplots(2, 1, sharex=True)
    panels: tuple[tuple[Axes, str, Callable[[Row], Any]], ...] = (
        (upper, "registers of a thread", lambda row: row.registers),
        (lower, "occupancy, %", lambda row: 100 * (row.occupancy or 0)),
    )
    for axes, name, y in panels:
        points(axes, rows, style, y)
        _mark_planned(axes, found, rows, style, y)
        style.axis_of_tiles(axes)
        axes.set_ylabel(name, fontsize=9)
    upper.tick_params(labelbottom=False)
    upper.set_xlabel("")
    lower.set_ylim(bottom=0)
    return upper


def _measured(drawn: Figure, found: Findings, rows: list[Row]) -> Axes:
    """Draw times and the roofline; return the axes whose legend holds for all."""
    style = Style(rows)
    width = max(6.0, 1.5 + 0.27 * len(style.places))
    drawn.set_size_inches(width + 4.5, 5.6)
    left, right = drawn.subplots(1, 2, width_ratios=(width, 4.5))
    _draw_times(left, found, rows, style)
    _draw_roofline(right, found, rows, style)
    return left


def _mark_planned(
    axes: Axes,
    found: Findings,
    rows: list[Row],
    style: Style,
    y: Callable[[Row], Any],
) -> None:
    planned = found.planned
    row = next((row for row in rows if row.variant == planned), None)
    if row is not None:
        ring(axes, style.x(planned), y(row), INK, f"planned: {tile_name(planned)}")


def _draw_times(axes: Axes, found: Findings, rows: list[Row], style: Style) -> None:
    def y(row: Row) -> float:
        return row.median_us or 0.0

    for row in rows:
        half = y(row) * (row.spread or 0.0) / 2
        axes.errorbar(style.x(row.variant), y(row), half, color="#999999", lw=0.8, zorder=2)
    points(axes, rows, style, y)
    _mark_planned(axes, found, rows, style, y)
    best = found.best
    if best is not None:
        label = f"best: {tile_name(best.variant)}, {y(best):.4g} us"
        ring(axes, style.x(best.variant), y(best), BEST, label, 16)
        axes.axhline(y(best), color=BEST, lw=0.8, ls=":", zorder=1)
    style.axis_of_tiles(axes)
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))
    axes.set_ylabel("time of a call, us (less is better)", fontsize=9)


def _draw_roofline(axes: Axes, found: Findings, rows: list[Row], style: Style) -> None:
    problem, ceilings = found.problem, found.ceilings
    operations = flops(problem)
    intensity = operations / nbytes(problem)

    def speed(row: Row) -> float:
        return operations / (row.median_us or 1.0) / 1e6

    if ceilings is not None:
        _draw_ceilings(axes, intensity, ceilings["read_gbs"], ceilings.get("gemm_tflops"))
    axes.axvline(intensity, color="#999999", lw=0.8, ls=":", zorder=1)
    for row in rows:
        look = style.look(row.variant)
        axes.plot(intensity, speed(row), marker="_", ms=9, color=look["color"], zorder=3)
    best = found.best
    if best is not None:
        ring(axes, intensity, speed(best), BEST, "best", 14)
        share = best.ceiling_fraction
        of = "" if share is None else f"\n{share:.0%} of the ceiling"
        axes.annotate(
            f"{speed(best):.3g} TFLOP/s{of}",
            (intensity, speed(best)),
            (12, -4),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=BEST,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte of Q, K, V and O", fontsize=9)
    axes.set_ylabel("TFLOP/s", fontsize=9)
    finish(axes)
    _plain_numbers(axes.xaxis, (1.0,))
    _plain_numbers(axes.yaxis, (1.0, 2.0, 5.0))


def _draw_ceilings(axes: Axes, intensity: float, gbs: float, tflops: float | None) -> None:
    """Draw the roof: what memory lets through, and, where it was measured, the matrix product."""
    ridge = intensity if tflops is None else tflops * 1e3 / gbs
    low, high = min(intensity, ridge) / 8, max(intensity, ridge) * 8
    roof = high * gbs / 1e3 if tflops is None else tflops
    xs = [low, high] if tflops is None else [low, ridge, high]
    axes.plot(xs, [min(x * gbs / 1e3, roof) for x in xs], color=INK, lw=1.8, zorder=2)
    notes = [(f"memory {gbs:.0f} GB/s", (low, low * gbs / 1e3), (10, 0), "left")]
    if tflops is not None:
        notes.append((f"matrix product {tflops:.0f} TFLOP/s", (high, tflops), (0, 8), "right"))
    for text, place, offset, side in notes:
        axes.annotate(
            text,
            place,
            offset,
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8,
            color=INK,
        )


def _plain_numbers(axis: Axis, steps: tuple[float, ...]) -> None:
    """Label a logarithmic axis at these steps of each decade, without powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
