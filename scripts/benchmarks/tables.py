"""The tables of a page: columns of rows, ratios and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from benchmarks.summary import (
    dim_words,
    figure_of,
    peer_names,
    ratio,
    summarise,
    summarise_errors,
)

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], Any]]
"""The columns of a table: how to show a row in each, by its heading."""


def table(head: Iterable[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a table of what stands in each line."""
    head = list(head)
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def table_of(rows: Iterable[Row], columns: Columns) -> str:
    """Return a table with a line a row."""
    return table(columns, ([show(row) for show in columns.values()] for row in rows))


def _either(row: Row, one: str, other: str, between: str) -> str:
    """Return a size, and behind it another one where they differ."""
    return f"{row[one]}" if row[one] == row[other] else f"{row[one]}{between}{row[other]}"


CELL: Columns = {
    "dtype": itemgetter("dtype"),
    "D": dim_words,
    "mask": lambda row: "causal" if row["causal"] else "full",
    "S": lambda row: _either(row, "sq", "sk", "x"),
    "batch": itemgetter("b"),
    "heads": lambda row: _either(row, "hq", "hk", "/"),
}


def figures(names: Iterable[str], kind: str = "", unit: str = "", form: str = "") -> Columns:
    """Return the columns of contestants' figures of a kind, see `figure_of`."""

    def shown(name: str, row: Row) -> str:
        value = figure_of(row, name, kind)
        if value is None:
            return ""
        return format(value, form or (".1f" if value >= 10 else ".2f"))

    return {f"{name}{unit}": partial(shown, name) for name in names}


def summary(rows: Sequence[Row], by: tuple[str, ...] = ("dtype",)) -> str:
    """Return a table of the ratios to each peer, for each group of rows that are alike in `by`."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    lines = []
    for group, chosen in groups.items():
        for peer, found in summarise(chosen).items():
            _, d, mask, seq, *_ = (show(found.worst) for show in CELL.values())
            ratios = found.cells, f"{found.geomean:.3f}", f"{found.minimum:.3f}"
            model = f"{found.worst['model']}: " if "model" in found.worst else ""
            lines.append([*group, peer, *ratios, f"{model}D {d}, {mask}, S {seq}"])
    head = [*by, "peer", "cells", "geometric mean", "minimum", "where the minimum is"]
    return table(head, lines)


def cell_table(rows: Sequence[Row], form: str = ".2f") -> str:
    """Return a table of all figures, and of the ratios to each peer."""
    peers = peer_names(rows)
    unit = rows[0]["unit"] if rows else ""

    def ratio_to(peer: str, row: Row) -> str:
        return format(ratio(row, peer), form) if peer in row["peers"] else ""

    found = [
        name
        for name in ("case", "feature", "model", "mode", "page_size")
        if any(name in row for row in rows)
    ]
    names: Columns = {name: partial(_or_nothing, name) for name in found}
    columns: Columns = {
        **names,
        **CELL,
        "kernel": itemgetter("kernel"),
        **figures(("cufa", *peers)),
    }
    for peer in peers:
        columns[f"{peer}/cufa" if unit == "us" else f"cufa/{peer}"] = partial(ratio_to, peer)
    if any("of_read" in row for row in rows):
        columns["of reading"] = lambda row: f"{row['of_read']:.1%}"
    if any("replayed" in row for row in rows):
        columns["timed by"] = _timing_words
    return f"Every cell, {unit}:\n\n{table_of(rows, columns)}"


def _or_nothing(name: str, row: Row) -> Any:
    """Return a field that not all rows of a table have."""
    return row.get(name, "")


def _timing_words(row: Row) -> str:
    """Return what the contestants of a row are timed by: graph replay, and else events."""
    names = ["cufa", *row["peers"]]
    by_events = [name for name in names if name not in row.get("replayed", ())]
    if not by_events:
        return "graph"
    return "events" if len(by_events) == len(names) else f"graph; {', '.join(by_events)}: events"


def error_summary(rows: Sequence[Row]) -> str:
    """Return a table of the largest errors of each peer and of cufa."""
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        chosen = [row for row in rows if row["dtype"] == dtype]
        for peer, found in summarise_errors(chosen).items():
            errors = [f"{found.cufa_largest:.2e}", f"{found.largest:.2e}"]
            lines.append([dtype, peer, *errors, f"{found.quotient:.2f}"])
    head = ["dtype", "peer", "cufa", "the peer", "largest quotient in a cell"]
    text = "Largest error against float64 over the cells that both ran:"
    return f"{text}\n\n{table(head, lines)}"


def error_table(rows: Sequence[Row]) -> str:
    """Return a table of all errors."""
    columns = {**CELL, **figures(("cufa", *summarise_errors(rows)), "_maxerr", form=".2e")}
    text = "Errors of every cell, on the same rows of the result for all:"
    return f"{text}\n\n{table_of(rows, columns)}"
