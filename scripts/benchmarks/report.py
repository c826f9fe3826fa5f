"""A Markdown page and a plot from a result file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import plots, results
from benchmarks.summary import (
    dim_words,
    figure_of,
    geomean,
    peer_names,
    ratio,
    summarise,
    summarise_errors,
)

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], Any]]
"""What stands in each column of a table, by its heading."""

_TITLES = {
    "prefill": "Prefill",
    "gqa": "Grouped-query attention",
    "headdims": "Head dims",
    "sustained": "Speed held for seconds",
    "fp32": "float32",
    "host": "Host cost of a call",
    "jit": "First call in a new process",
    "explore": "The explorer",
    "tune": "The standard table, tuned",
    "refactor": "The standard tables before and after",
    "refactor-compile": "What compiling takes, before and after,",
}


def write_report(path: Path) -> tuple[Path, Path]:
    """Write the page and the plot of a result file beside it, and return their paths.

    ValueError where the file is not of the agreed shape.
    """
    result = results.read(path)
    page, plot = path.with_suffix(".md"), path.with_suffix(".png")
    plots.draw(result, plot)
    page.write_text(markdown(result, path.name, plot.name), encoding="utf-8")
    return page, plot


def markdown(result: dict[str, Any], source: str, plot: str) -> str:
    """Return the page of a checked result: where it ran, the plot, the ratios, every row.

    `source` and `plot` name the result file and the plot, which lie beside the page.
    """
    bench = result["bench"]
    rows = result["rows"]
    title = f"# {_TITLES.get(bench, bench)} on {result['device']}"
    parts = [title, _origin(result, source), f"![{bench}]({plot})"]
    if bench == "jit":
        parts.append(_jit_table(rows))
    elif bench == "explore":
        parts.append(_explore_table(rows))
    elif bench == "refactor-compile":
        parts.append(_compile_table(rows))
    elif bench == "refactor":
        words = "How many times as fast cufa is as before, with the kernels of each table"
        parts += [f"{words}:\n\n{_summary(rows, ('dtype', 'kernel'))}", _cell_table(rows, ".3f")]
    else:
        ratios = "How many times as fast as each peer cufa is"
        if bench == "headdims":  # other head dims are other work
            ratios = "How many times the TFLOP/s of each peer cufa has"
        by = ("case",) if any("case" in row for row in rows) else ("dtype",)
        parts += [f"{ratios}:\n\n{_summary(rows, by)}", _cell_table(rows)]
        if bench == "sustained":
            parts.append(_card_table(rows))
        if any("cufa_maxerr" in row for row in rows):
            parts += [_error_summary(rows), _error_table(rows)]
    return "\n\n".join(parts) + "\n"


def _origin(result: dict[str, Any], source: str) -> str:
    ceilings = result["ceilings"]
    software = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"Made from [{source}]({source}) by `python scripts/bench.py report`; not edited.",
        "",
        f"- command: `{result['command']}`",
        f"- commit: {result['commit']}, {result['date']}",
    ]
    if "before" in result:
        lines.append(f"- before: {result['before']}")
    lines.append(f"- driver {result['driver']}; {software}")
    if ceilings:
        lines.append(
            f"- ceilings in the same run: read {ceilings['read_gbs']:.0f} GB/s, copy "
            f"{ceilings['copy_gbs']:.0f} GB/s, bf16 matrix product "
            f"{ceilings['gemm_bf16_tflops']:.0f} TFLOP/s"
        )
    return "\n".join(lines)


def _table(head: Iterable[str], lines: Iterable[Sequence[Any]]) -> str:
    head = list(head)
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def _lines(rows: Sequence[Row], columns: Columns) -> list[list[Any]]:
    return [[show(row) for show in columns.values()] for row in rows]


def _either(row: Row, one: str, other: str, between: str) -> str:
    """Return a size, and behind it another one where they differ."""
    return f"{row[one]}" if row[one] == row[other] else f"{row[one]}{between}{row[other]}"


_CELL: Columns = {
    "dtype": itemgetter("dtype"),
    "D": dim_words,
    "mask": lambda row: "causal" if row["causal"] else "full",
    "S": lambda row: _either(row, "sq", "sk", "x"),
    "batch": itemgetter("b"),
    "heads": lambda row: _either(row, "hq", "hk", "/"),
}


def _figures(names: Iterable[str], kind: str = "", unit: str = "", form: str = "") -> Columns:
    """Return the columns of contestants' figures of a kind, see `figure_of`."""

    def shown(name: str, row: Row) -> str:
        value = figure_of(row, name, kind)
        if value is None:
            return ""
        return format(value, form or (".1f" if value >= 10 else ".2f"))

    return {f"{name}{unit}": partial(shown, name) for name in names}


def _summary(rows: Sequence[Row], by: tuple[str, ...] = ("dtype",)) -> str:
    """Return a table of the ratios to each peer, for each group of rows that are alike in `by`."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    lines = []
    for group, chosen in groups.items():
        for peer, found in summarise(chosen).items():
            _, d, mask, seq, *_ = (show(found.worst) for show in _CELL.values())
            figures = found.cells, f"{found.geomean:.3f}", f"{found.minimum:.3f}"
            lines.append([*group, peer, *figures, f"D {d}, {mask}, S {seq}"])
    head = [*by, "peer", "cells", "geometric mean", "minimum", "where the minimum is"]
    return _table(head, lines)


def _cell_table(rows: Sequence[Row], form: str = ".2f") -> str:
    peers = peer_names(rows)
    unit = rows[0]["unit"] if rows else ""

    def ratio_to(peer: str, row: Row) -> str:
        return format(ratio(row, peer), form) if peer in row["peers"] else ""

    case: Columns = {"case": itemgetter("case")} if any("case" in row for row in rows) else {}
    figures = _figures(("cufa", *peers))
    columns: Columns = {**case, **_CELL, "kernel": itemgetter("kernel"), **figures}
    for peer in peers:
        columns[f"{peer}/cufa" if unit == "us" else f"cufa/{peer}"] = partial(ratio_to, peer)
    if any("replayed" in row for row in rows):
        columns["timed by"] = _timing_words
    return f"Every cell, {unit}:\n\n{_table(columns, _lines(rows, columns))}"


def _timing_words(row: Row) -> str:
    """Return what the contestants of a row are timed by: graph replay, and else events."""
    names = ["cufa", *row["peers"]]
    by_events = [name for name in names if name not in row.get("replayed", ())]
    if not by_events:
        return "graph"
    return "events" if len(by_events) == len(names) else f"graph; {', '.join(by_events)}: events"


def _card_table(rows: Sequence[Row]) -> str:
    names = ["cufa", *peer_names(rows)]
    clock, power = _figures(names, "_clock_mhz", ", MHz"), _figures(names, "_power_w", ", W")
    columns = {**_CELL, **clock, **power}
    text = "Clock of the multiprocessors and power of the card meanwhile:"
    return f"{text}\n\n{_table(columns, _lines(rows, columns))}"


def _error_summary(rows: Sequence[Row]) -> str:
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        chosen = [row for row in rows if row["dtype"] == dtype]
        for peer, found in summarise_errors(chosen).items():
            errors = [f"{found.cufa_largest:.2e}", f"{found.largest:.2e}"]
            lines.append([dtype, peer, *errors, f"{found.quotient:.2f}"])
    head = ["dtype", "peer", "cufa", "the peer", "largest quotient in a cell"]
    text = "Largest error against float64 over the cells that both ran:"
    return f"{text}\n\n{_table(head, lines)}"


def _error_table(rows: Sequence[Row]) -> str:
    columns = {**_CELL, **_figures(("cufa", *summarise_errors(rows)), "_maxerr", form=".2e")}
    text = "Errors of every cell, on the same rows of the result for all:"
    return f"{text}\n\n{_table(columns, _lines(rows, columns))}"


def _jit_table(rows: Sequence[Row]) -> str:
    lines = [[row["variant"], f"{row['cold_s']:.3f}", f"{row['warm_s']:.3f}"] for row in rows]
    if rows:
        cold, warm = (max(row[key] for row in rows) for key in ("cold_s", "warm_s"))
        lines.append(["**longest**", f"{cold:.3f}", f"{warm:.3f}"])
    return _table(["variant", "cold cache, s", "warm disk cache, s"], lines)


def _compile_table(rows: Sequence[Row]) -> str:
    quotients = [row["cold_s"] / row["before_cold_s"] for row in rows]
    lines = [
        [f"`{row['variant']}`", f"{row['cold_s']:.3f}", f"{row['before_cold_s']:.3f}", f"{q:.3f}"]
        for row, q in zip(rows, quotients, strict=True)
    ]
    if rows:
        lines.append(["**geometric mean**", "", "", f"{geomean(quotients):.3f}"])
        lines.append(["**largest**", "", "", f"{max(quotients):.3f}"])
    return _table(["variant", "seconds of the processor", "before", "quotient"], lines)


def _explore_table(rows: Sequence[Row]) -> str:
    head = ["variants", "s, cold", "winner", "us", "fastest when all are timed", "us", "quotient"]
    lines = [
        [
            row["variants"],
            f"{row['seconds']:.0f}",
            f"`{row['winner']}`",
            f"{row['winner_us']:.1f}",
            f"`{row['best']}`",
            f"{row['best_us']:.1f}",
            f"{row['best_us'] / row['winner_us']:.3f}",
        ]
        for row in rows
    ]
    return _table(head, lines)
