"""A Markdown page and a plot from a result file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots, results
from benchmarks.summary import dim_words, peer_names, ratio, summarise, summarise_errors

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
}


def write_report(path: Path) -> tuple[Path, Path]:
    """Write the page and the plot of a result file beside it.

    Parameters
    ----------
    path : Path
        A result file, ``<name>.json``.

    Returns
    -------
    tuple of Path
        ``<name>.md`` and ``<name>.png``.

    Raises
    ------
    ValueError
        When the file is not of the agreed shape.
    """
    result = results.read(path)
    page, plot = path.with_suffix(".md"), path.with_suffix(".png")
    plots.draw(result, plot)
    page.write_text(markdown(result, path.name, plot.name), encoding="utf-8")
    return page, plot


def markdown(result: dict[str, Any], source: str, plot: str) -> str:
    """Return the page of a result: where it ran, the plot, the ratios, every row.

    Parameters
    ----------
    result : dict
        A checked result object.
    source, plot : str
        Names of the result file and of the plot, which lie beside the page.
    """
    bench = result["bench"]
    rows = result["rows"]
    title = f"# {_TITLES.get(bench, bench)} on {result['device']}"
    parts = [title, _origin(result, source), f"![{bench}]({plot})"]
    if bench == "jit":
        parts.append(_jit_table(rows))
    elif bench == "explore":
        parts.append(_explore_table(rows))
    else:
        ratios = "How many times as fast as each peer cufa is"
        if bench == "headdims":  # other head dims are other work
            ratios = "How many times the TFLOP/s of each peer cufa has"
        parts += [_summary(rows, ratios), _cell_table(rows)]
        if bench == "sustained":
            parts.append(_card_table(rows))
        if any("cufa_maxerr" in row for row in rows):
            parts += [_error_summary(rows), _error_table(rows)]
    return "\n\n".join(parts) + "\n"


def _origin(result: dict[str, Any], source: str) -> str:
    ceilings = result["ceilings"]
    software = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(
        [
            f"Made from [{source}]({source}) by `python scripts/bench.py report`; not edited.",
            "",
            f"- command: `{result['command']}`",
            f"- commit: {result['commit']}, {result['date']}",
            f"- driver {result['driver']}; {software}",
            f"- ceilings in the same run: read {ceilings['read_gbs']:.0f} GB/s, copy "
            f"{ceilings['copy_gbs']:.0f} GB/s, bf16 matrix product "
            f"{ceilings['gemm_bf16_tflops']:.0f} TFLOP/s",
        ]
    )


def _summary(rows: Sequence[dict[str, Any]], text: str) -> str:
    """Return a table of the ratios to each peer, by dtype."""
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        chosen = [row for row in rows if row["dtype"] == dtype]
        for peer, found in summarise(chosen).items():
            worst = _cell_words(found.worst)
            lines.append(
                [dtype, peer, found.cells, f"{found.geomean:.3f}", f"{found.minimum:.3f}", worst]
            )
    head = ["dtype", "peer", "cells", "geometric mean", "minimum", "where the minimum is"]
    return f"{text}:\n\n{_table(head, lines)}"


def _cell_table(rows: Sequence[dict[str, Any]]) -> str:
    peers = peer_names(rows)
    ratios = [f"cufa/{peer}" for peer in peers]
    unit = rows[0]["unit"] if rows else ""
    replayed = any("replayed" in row for row in rows)
    if unit == "us":
        ratios = [f"{peer}/cufa" for peer in peers]
    lines = [
        [
            *_cell_columns(row),
            row["kernel"],
            _figure(row["cufa"]),
            *(_figure(row["peers"].get(peer)) for peer in peers),
            *(f"{ratio(row, peer):.2f}" if peer in row["peers"] else "" for peer in peers),
            *([_timing_words(row)] if replayed else []),
        ]
        for row in rows
    ]
    head = [*_CELL_HEAD, "kernel", "cufa", *peers, *ratios, *(["timed by"] if replayed else [])]
    return f"Every cell, {unit}:\n\n{_table(head, lines)}"


def _card_table(rows: Sequence[dict[str, Any]]) -> str:
    peers = peer_names(rows)
    names = ["clock_mhz", "power_w"]
    lines = [
        [
            *_cell_columns(row),
            *(
                _figure(figure)
                for name in names
                for figure in (row[f"cufa_{name}"], *map(row[f"peers_{name}"].get, peers))
            ),
        ]
        for row in rows
    ]
    head = [f"{who}, {unit}" for unit in ("MHz", "W") for who in ("cufa", *peers)]
    text = "Clock of the multiprocessors and power of the card meanwhile:"
    return f"{text}\n\n{_table([*_CELL_HEAD, *head], lines)}"


def _error_summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        chosen = [row for row in rows if row["dtype"] == dtype]
        for peer, found in summarise_errors(chosen).items():
            errors = [f"{found.cufa_largest:.2e}", f"{found.largest:.2e}"]
            lines.append([dtype, peer, *errors, f"{found.quotient:.2f}"])
    head = ["dtype", "peer", "cufa", "the peer", "largest quotient in a cell"]
    text = "Largest error against float64 over the cells that both ran:"
    return f"{text}\n\n{_table(head, lines)}"


def _error_table(rows: Sequence[dict[str, Any]]) -> str:
    peers = list(summarise_errors(rows))
    lines = [
        [
            *_cell_columns(row),
            *(
                "" if error is None else f"{error:.2e}"
                for error in (
                    row.get("cufa_maxerr"),
                    *(row.get("peers_maxerr", {}).get(peer) for peer in peers),
                )
            ),
        ]
        for row in rows
    ]
    text = "Errors of every cell, on the same rows of the result for all:"
    return f"{text}\n\n{_table([*_CELL_HEAD, 'cufa', *peers], lines)}"


def _jit_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [[row["variant"], f"{row['cold_s']:.3f}", f"{row['warm_s']:.3f}"] for row in rows]
    if rows:
        cold, warm = (max(row[key] for row in rows) for key in ("cold_s", "warm_s"))
        lines.append(["**longest**", f"{cold:.3f}", f"{warm:.3f}"])
    return _table(["variant", "cold cache, s", "warm disk cache, s"], lines)


def _explore_table(rows: Sequence[dict[str, Any]]) -> str:
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
    head = ["variants", "s, cold", "winner", "us", "fastest when all are timed", "us", "quotient"]
    return _table(head, lines)


_CELL_HEAD = ["dtype", "D", "mask", "S", "batch", "heads"]


def _cell_columns(row: dict[str, Any]) -> list[Any]:
    seq = row["sq"] if row["sq"] == row["sk"] else f"{row['sq']}x{row['sk']}"
    heads = row["hq"] if row["hq"] == row["hk"] else f"{row['hq']}/{row['hk']}"
    dims, mask = dim_words(row), "causal" if row["causal"] else "full"
    return [row["dtype"], dims, mask, seq, row["b"], heads]


def _cell_words(row: dict[str, Any]) -> str:
    _, d, mask, seq, *_ = _cell_columns(row)
    return f"D {d}, {mask}, S {seq}"


def _timing_words(row: dict[str, Any]) -> str:
    """Return what the contestants of a row are timed by: graph replay, and else events."""
    names = ["cufa", *row["peers"]]
    by_events = [name for name in names if name not in row.get("replayed", ())]
    if not by_events:
        return "graph"
    return "events" if len(by_events) == len(names) else f"graph; {', '.join(by_events)}: events"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)
