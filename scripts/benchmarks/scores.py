"""How far the speed depends on the data: one figure from several result files of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.plots import canvas, length_words, save
from benchmarks.summary import ratio

PEER = "cudnn"
_FILES = {
    "normal": ("prefill", "prefill-fp16"),
    "sharp": ("prefill-sharp",),
    "rising": ("prefill-rising",),
}
_COLOURS = {"normal": "#d62728", "sharp": "#1f77b4", "rising": "#2ca02c"}
_LINES = {"bfloat16": "-", "float16": "--"}

Row = dict[str, Any]


def write_figures(folder: Path) -> list[Path]:
    """Draw ``<gpu>-prefill-scores.png`` for each GPU with a file of every kind of scores.

    Parameters
    ----------
    folder : Path
        Where the result files are, and the figures come.
    """
    written = []
    for sharp in sorted(folder.glob("*-prefill-sharp.json")):
        gpu = sharp.name.removesuffix("-prefill-sharp.json")
        paths = {
            kind: [path for name in names if (path := folder / f"{gpu}-{name}.json").exists()]
            for kind, names in _FILES.items()
        }
        if not all(paths.values()):
            continue
        rows = {
            kind: [row for path in found for row in results.read(path)["rows"]]
            for kind, found in paths.items()
        }
        written.append(folder / f"{gpu}-prefill-scores.png")
        _draw(rows, written[-1])
    return written


def _draw(rows: Mapping[str, list[Row]], path: Path) -> None:
    """Draw a panel a (head dim, mask), and in it a line a kind and dtype over the lengths.

    Ratios, as figures of different runs cannot be compared; the lengths are those of all kinds.
    """
    common = set.intersection(*({row["sq"] for row in found} for found in rows.values()))
    shown = {
        kind: [row for row in found if row["sq"] in common and PEER in row["peers"]]
        for kind, found in rows.items()
    }
    dims = sorted({row["d"] for found in shown.values() for row in found})
    figure = canvas()
    figure.set_size_inches(max(6.4, 3.4 * len(dims)), 5.6)
    panels = figure.subplots(2, max(1, len(dims)), sharex=True, sharey=True, squeeze=False)
    for column, d in enumerate(dims):
        for line, causal in enumerate((False, True)):
            axes = panels[line][column]
            axes.axhline(1, color="black", lw=0.8)
            for kind, found in shown.items():
                for dtype, style in _LINES.items():
                    cell = (dtype, d, causal)
                    points = sorted(
                        (row["sq"], ratio(row, PEER))
                        for row in found
                        if (row["dtype"], row["d"], row["causal"]) == cell
                    )
                    if points:
                        label = f"{kind}, {dtype}"
                        xs, ys = zip(*points, strict=True)
                        axes.plot(
                            xs, ys, style, marker="o", ms=3, color=_COLOURS[kind], label=label
                        )
            axes.set_title(f"D {d}, {'causal' if causal else 'full'}", fontsize=9)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(common), [length_words(s) for s in sorted(common)])
            axes.grid(alpha=0.3)
            if line:
                axes.set_xlabel("sequence length")
            if not column:
                axes.set_ylabel(f"times as fast as {PEER}")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle("What the scores' distribution does to cufa's speed")
    save(figure, path)
