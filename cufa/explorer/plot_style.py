"""How the figures of an exploration look: where a variant stands, its colour and its marker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from cufa.explorer.result import Row
from cufa.explorer.table import flags
from cufa.variant import Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which also colour-blind readers tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442")
_MARKERS = ("o", "s", "D", "P", "X", "v")  # with room for a hole
BEST, INK, _PALE = "#d55e00", "#333333", "#f3f4f6"
_LETTER_INCHES, _KEY_INCHES = 0.062, 0.55  # of a legend at 8 points: a letter, and all beside text
_WIDTH = 0.6  # over which the variants of one tile are spread, of the distance between tiles

_Tile = tuple[str, int, int, int, int]
_Value = TypeVar("_Value", int, tuple[int, str])


class Style:
    """Where each variant of the rows stands on the axis of tiles, and how it looks."""

    def __init__(self, rows: list[Row]) -> None:
        variants = [row.variant for row in rows]
        self.places = {tile: i for i, tile in enumerate(sorted({_tile(v) for v in variants}))}
        self._colours = _cycle((v.stages for v in variants), _COLOURS)
        self._markers = _cycle((_marked(v) for v in variants), _MARKERS)
        # The variants of a tile side by side, in the order of the legend.
        self._x: dict[Variant, float] = {}
        for tile, place in self.places.items():
            group = sorted((v for v in variants if _tile(v) == tile), key=_in_tile)
            step = _WIDTH / max(1, len(group) - 1)
            for i, variant in enumerate(group):
                self._x[variant] = place - step * (len(group) - 1) / 2 + i * step

    def x(self, variant: Variant) -> float:
        """Return a variant's place on the axis of tiles."""
        return self._x[variant]

    def look(self, variant: Variant) -> dict[str, Any]:
        """Return colour, marker and label of a variant's point."""
        stages = f"{variant.stages} stage{'s' if variant.stages > 1 else ''}"
        return {
            "color": self._colours[variant.stages],
            "marker": self._markers[_marked(variant)],
            "label": ", ".join(filter(None, (stages, f"{variant.warps} warps", flags(variant)))),
        }

    def axis_of_tiles(self, axes: Axes) -> None:
        """Label the tiles, with a band for each bm."""
        bands: dict[tuple[Any, ...], list[int]] = {}
        for (kernel, head_dim, head_dim_v, bm, _), place in self.places.items():
            bands.setdefault((kernel, head_dim, head_dim_v, bm), []).append(place)
        for i, places in enumerate(bands.values()):
            if i % 2 == 0:
                axes.axvspan(places[0] - 0.5, places[-1] + 0.5, color=_PALE, zorder=0, lw=0)
        several = len({tile[:3] for tile in self.places}) > 1
        names = [
            f"{bm}x{bn}" + (f" {kernel} {d}/{dv}" if several else "")
            for kernel, d, dv, bm, bn in self.places
        ]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axes.set_xlim(-0.7, len(names) - 0.3)
        axes.set_xlabel("tile, bm x bn")
        finish(axes)


def _tile(variant: Variant) -> _Tile:
    return (variant.kernel, variant.head_dim, variant.head_dim_v, variant.bm, variant.bn)


def _in_tile(variant: Variant) -> tuple[int, int, str, int]:
    """Return the place among the variants of a tile: that of the legend, then by blocks."""
    return (variant.stages, *_marked(variant), variant.blocks_per_sm)


def _marked(variant: Variant) -> tuple[int, str]:
    """Return what a marker stands for."""
    return (variant.warps, flags(variant))


def _cycle(values: Iterable[_Value], looks: tuple[str, ...]) -> dict[_Value, str]:
    return {value: looks[i % len(looks)] for i, value in enumerate(sorted(set(values)))}


def finish(axes: Axes) -> None:
    """Take away what distracts."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", which="both", alpha=0.25, lw=0.6)
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)


def tile_name(variant: Variant) -> str:
    """Return the free template arguments in few words."""
    v = variant
    return f"{v.bm}x{v.bn}, {v.stages} st., {v.warps} w. {flags(v)}".rstrip()


def points(axes: Axes, rows: list[Row], style: Style, y: Callable[[Row], Any]) -> None:
    """Draw a point a row, each look once in the legend, in the order of the legend."""
    labels: set[str] = set()
    for row in sorted(rows, key=lambda row: _in_tile(row.variant)):
        look = style.look(row.variant)
        label = look.pop("label")
        new = label not in labels
        labels.add(label)
        axes.plot(
            style.x(row.variant),
            y(row),
            linestyle="none",
            ms=5.5,
            mec="white",
            mew=0.5,
            label=label if new else None,
            zorder=3,
            **look,
        )
        if row.spill_bytes:  # a hole in the point
            axes.plot(style.x(row.variant), y(row), "o", color="white", ms=2.4, zorder=3.5)
    if any(row.spill_bytes for row in rows):
        hole: dict[str, Any] = {"color": "#777777", "mfc": "white", "mew": 1.8, "ms": 4.5}
        axes.plot([], [], "o", label="with a hole: spills registers", **hole)


def ring(axes: Axes, x: float, y: float, colour: str, label: str, size: float = 12) -> None:
    """Draw a ring around a point."""
    axes.plot(
        x,
        y,
        marker="o",
        ms=size,
        mfc="none",
        mec=colour,
        mew=1.6,
        linestyle="none",
        label=label,
        clip_on=False,
        zorder=4,
    )


def legend_columns(labels: list[str], width: float) -> int:
    """Return how many columns of a legend in this font fit a figure, `width` in inches."""
    for count in range(len(labels), 1, -1):
        rows, longer = divmod(len(labels), count)
        used, first = 0.0, 0
        for column in range(count):
            last = first + rows + (column < longer)
            used += _KEY_INCHES + _LETTER_INCHES * max(map(len, labels[first:last]))
            first = last
        if used <= width:
            return count
    return 1
