"""Plots of result files, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cost_fit
from benchmarks.summary import dim_words, figure_of, peer_names, ratio, regret
from cufa.specs.hopper_costs import COSTS

_CUFA_COLOUR = "#d62728"
_PEER_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the plot of a checked result into a PNG file."""
    figure = canvas()
    rows = result["rows"]
    if result["bench"] == "jit":
        _draw_seconds(figure, rows)
    elif result["bench"] == "refactor":
        _draw_ratios(figure, rows)
    elif result["bench"] == "models":
        _draw_models(figure, rows)
    elif result["bench"] == "decode":
        _draw_decode(figure, rows)
    elif result["bench"] == "fp8-error":
        _draw_errors(figure, rows)
    elif result["bench"] == "cpu":
        _draw_cpu(figure, rows)
    elif result["bench"] == "masks":
        _draw_masks(figure, rows)
    elif result["bench"] == "backward":
        _draw_backward(figure, rows)
    elif result["bench"] == "generate":
        _draw_generate(figure, rows)
    elif result["bench"] == "regret":
        _draw_regret(figure, rows)
    elif result["bench"] == "costs":
        _draw_costs(figure, result)
    elif result["bench"] == "headdims":
        _draw_dims(figure, rows)
    elif all(row["unit"] == "us" for row in rows):
        _draw_bars(figure, rows)
    else:
        _draw_lines(figure, rows)
    figure.suptitle(f"{result['bench']}, {result['device']}")
    save(figure, path)


def canvas() -> Any:
    """Return an empty figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure, without the date and version that would make each drawing another file."""
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_lines(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a panel a (dtype, head dim, mask), and in it a line a contestant over the lengths."""
    groups: dict[tuple[str, int], dict[bool, list[dict[str, Any]]]] = {}
    for row in rows:
        group = groups.setdefault((row["dtype"], row["d"]), {False: [], True: []})
        group[row["causal"]].append(row)
    colours = _colours(rows)
    figure.set_size_inches(max(6.4, 4.2 * len(groups)), 6.4)
    panels = figure.subplots(2, len(groups), sharex=True, squeeze=False)
    for column, ((dtype, d), masks) in enumerate(groups.items()):
        for line, causal in enumerate((False, True)):
            axes = panels[line][column]
            axes.set_title(f"{dtype}, D {d}, {'causal' if causal else 'full'}", fontsize=9)
            for name, colour in colours.items():
                points = [(row["sq"], figure_of(row, name)) for row in masks[causal]]
                known = sorted((s, y) for s, y in points if y is not None)
                if known:
                    xs, ys = zip(*known, strict=True)
                    width = 2.2 if name == "cufa" else 1.2
                    axes.plot(xs, ys, "o-", color=colour, label=name, lw=width, ms=3)
            lengths = sorted({row["sq"] for row in masks[causal]})
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [length_words(s) for s in lengths])
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            if line:
                axes.set_xlabel("sequence length")
            if not column:
                axes.set_ylabel("TFLOP/s")
    handles, labels = _legend_of(panels)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) or 1, fontsize=8)


def _draw_dims(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a panel a mask, and in it a bar a contestant for each head dim."""
    # cufa's figure for other head dims is among its own bars already.
    colours = {name: c for name, c in _colours(rows).items() if not name.startswith("cufa_")}
    figure.set_size_inches(8, 6.4)
    panels = figure.subplots(2, 1, sharex=True, sharey=True, squeeze=False)
    labels = list(dict.fromkeys(map(dim_words, rows)))
    width = 0.8 / len(colours)
    for axes, causal in zip(panels[:, 0], (False, True), strict=True):
        chosen = [row for row in rows if row["causal"] == causal]
        for i, (name, colour) in enumerate(colours.items()):
            known = [row for row in chosen if figure_of(row, name) is not None]
            places = [labels.index(dim_words(row)) + (i + 0.5) * width - 0.4 for row in known]
            heights = [figure_of(row, name) for row in known]
            bars = axes.bar(places, heights, width, color=colour, label=name)
            axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
        axes.set_title("causal" if causal else "full", fontsize=9)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_ylabel("TFLOP/s")
        axes.margins(y=0.12)
    panels[1][0].set_xlabel("head dim")
    handles, names = _legend_of(panels)
    figure.legend(handles, names, loc="outside lower center", ncols=len(names) or 1, fontsize=8)


def _draw_errors(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the errors over the length, by kernel and head dim."""
    axes = figure.subplots()
    chosen = [row for row in rows if row["data"] == "lengths"]
    for kernel, d in dict.fromkeys((row["kernel"], row["d"]) for row in chosen):
        line = [row for row in chosen if (row["kernel"], row["d"]) == (kernel, d)]
        lengths, errors = ([row[name] for row in line] for name in ("s", "relative"))
        axes.plot(lengths, errors, "o-", label=f"{kernel}, D {d}", ms=3)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_xlabel("keys")
    axes.set_ylabel("error, of the result")
    if chosen:
        axes.legend(fontsize=8)


def _draw_bars(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a panel a row, and in it a bar a contestant."""
    colours = _colours(rows)
    figure.set_size_inches(6.4, 0.8 + 0.45 * len(colours) * max(1, len(rows)))
    panels = figure.subplots(max(1, len(rows)), 1, squeeze=False)[:, 0]
    for axes, row in zip(panels, rows, strict=False):
        known = [(name, figure_of(row, name)) for name in colours]
        names = [name for name, us in known if us is not None]
        times = [us for _, us in known if us is not None]
        bars = axes.barh(names, times, color=[colours[name] for name in names])
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        if "case" in row:
            axes.set_title(row["case"], fontsize=9)
    panels[-1].set_xlabel("us a call (less is better)")


def _draw_ratios(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a panel a family, and in it a point a cell: its speed by that before."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["family"], []).append(ratio(row, "before"))
    figure.set_size_inches(max(6.4, 3.2 * len(groups)), 4)
    panels = figure.subplots(1, max(1, len(groups)), sharey=True, squeeze=False)[0]
    for axes, (family, ratios) in zip(panels, groups.items(), strict=False):
        axes.axhline(1, color="black", lw=0.8)
        axes.plot(range(1, len(ratios) + 1), ratios, "o", color=_CUFA_COLOUR, ms=4)
        axes.set_title(family, fontsize=9)
        axes.set_xlabel("cell of the table")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("times as fast as before")


def _draw_peers(figure: Any, labels: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line a row, and on it a point a peer: how many times as fast cufa is."""
    colours = {name: colour for name, colour in _colours(rows).items() if name != "cufa"}
    series = {
        name: [ratio(row, name) if name in row["peers"] else None for row in rows]
        for name in colours
    }
    _draw_points(figure, labels, series, colours)
    figure.axes[0].set_xlabel("times as fast as each peer")


def _draw_models(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line a shape, and on it a point a peer: how many times as fast cufa is."""
    labels = [f"{row['model']}, {row['b']} x {length_words(row['sq'])}" for row in rows]
    _draw_peers(figure, labels, rows)


def _draw_decode(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line a contiguous cache, and on it a point a peer: how many times as fast cufa is."""
    rows = [row for row in rows if row["mode"] == "exact" and not row["page_size"]]
    labels = [
        f"{row['b']} x {row['kv']} keys, {row['hq']}/{row['hk']} heads of {row['d']}"
        + (f", {row['sq']} new tokens" if row["sq"] > 1 else "")
        for row in rows
    ]
    _draw_peers(figure, labels, rows)


def _draw_cpu(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line a shape, and on it a point a peer: how many times as fast cufa is."""
    labels = [
        f"{row['b']} x {row['sq']}, {row['hq']} heads of {row['d']}" + ", causal" * row["causal"]
        for row in rows
    ]
    _draw_peers(figure, labels, rows)


def _draw_masks(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line a feature and shape, and on it a point a peer: how many times as fast it is."""
    labels = [f"{row['feature']}, {length_words(row['sq'])} x {row['d']}" for row in rows]
    _draw_peers(figure, labels, rows)


def _draw_backward(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line a case, and on it a point a peer: how many times as fast cufa is."""
    labels = [
        f"{row.get('model', row['feature'])}, {length_words(row['sq'])} x {dim_words(row)}"
        + ", causal" * row["causal"]
        for row in rows
    ]
    _draw_peers(figure, labels, rows)


def _draw_generate(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a panel a batch, and in it a bar a contestant, and a line at the bound."""
    cases = [{**row, "case": f"{row['model']}, batch {row['batch']}"} for row in rows]
    _draw_bars(figure, cases)
    for axes, row in zip(figure.axes, rows, strict=True):
        axes.axvline(row["bound"], color="black", lw=0.8)
    figure.axes[-1].set_xlabel("tokens/s (more is better); the line is the bound")


def _draw_regret(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a point a problem, by the time of the planner's choice over the fastest."""
    ordered = sorted(rows, key=regret)
    labels = [
        f"{row['b']} x {row['hq']}/{row['hk']} x {row['sq']}x{row['sk']} x {row['d']}"
        + ", causal" * row["causal"]
        for row in ordered
    ]
    name = "the planner's choice"
    _draw_points(figure, labels, {name: [regret(row) for row in ordered]}, {name: _CUFA_COLOUR})
    figure.axes[0].set_xlabel("time by that of the fastest variant")


def _draw_costs(figure: Any, result: dict[str, Any]) -> None:
    """Draw a point a problem and variant: the predicted time by the measured one."""
    gpu = cost_fit.gpu_of(result)
    pairs = [
        (x.measured[name], x.predicted[name])
        for key, rows in cost_fit.by_key(result["rows"], gpu).items()
        for x in cost_fit.forecasts(rows, COSTS[key], gpu)
        for name in x.predicted.keys() & x.measured.keys()
    ]
    axes = figure.subplots()
    axes.axhline(1, color="black", lw=0.8)
    axes.plot([us for us, _ in pairs], [p / us for us, p in pairs], ".", color=_CUFA_COLOUR, ms=2)
    axes.set(xscale="log", xlabel="us, measured", ylabel="predicted by measured")


def _draw_points(
    figure: Any,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str],
) -> None:
    """Draw a line a label, and on it a point of each series that has one there."""
    figure.set_size_inches(8, 1.4 + 0.17 * len(labels))
    axes = figure.subplots()
    axes.axvline(1, color="black", lw=0.8)
    for name, values in series.items():
        known = [(value, i) for i, value in enumerate(values) if value is not None]
        axes.plot(*zip(*known, strict=True), "o", color=colours[name], label=name, ms=4)
    axes.set_yticks(range(len(labels)), labels, fontsize=6)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(series) or 1, fontsize=8)


def _draw_seconds(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw two bars a variant: its time from a cold cache and from a warm one."""
    figure.set_size_inches(7.2, 1.2 + 0.36 * len(rows))
    axes = figure.subplots()
    places = range(len(rows))
    for shift, colour, key, label in (
        (-0.2, _PEER_COLOURS[0], "cold_s", "cold cache"),
        (0.2, _CUFA_COLOUR, "warm_s", "warm disk cache"),
    ):
        seconds = [row[key] for row in rows]
        drawn = axes.barh([p + shift for p in places], seconds, 0.38, color=colour, label=label)
        axes.bar_label(drawn, fmt="%.3f", padding=3, fontsize=7)
    axes.set_yticks(list(places), [row["variant"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("s (less is better)")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)


def length_words(s: int) -> str:
    """Return a length as a label: 8k for 8192."""
    return f"{s // 1024}k" if s % 1024 == 0 else str(s)


def _colours(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    peers = peer_names(rows)
    return {
        "cufa": _CUFA_COLOUR,
        **{peer: _PEER_COLOURS[i % len(_PEER_COLOURS)] for i, peer in enumerate(peers)},
    }


def _legend_of(panels: Any) -> tuple[list[Any], list[str]]:
    """Return the handles and labels of all panels, each label once."""
    found: dict[str, Any] = {}
    for axes in panels.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
