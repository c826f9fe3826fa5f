"""A Markdown page and a plot from a result file."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import cost_fit, plots, results
from benchmarks.model_shapes import kind_of
from benchmarks.summary import geomean, peer_names, ratio, regret, with_best
from benchmarks.tables import (
    CELL,
    Columns,
    Row,
    cell_table,
    error_summary,
    error_table,
    figures,
    summary,
    table,
    table_of,
)
from cufa.explorer.table import tile_text
from cufa.specs.hopper_costs import COSTS
from cufa.specs.variant import Variant

BEST = "best peer"

_TITLES = {
    "prefill": "Prefill",
    "gqa": "Grouped-query attention",
    "headdims": "Head dims",
    "fp32": "float32",
    "host": "Host cost of a call",
    "jit": "First call in a new process",
    "models": "Shapes of real models",
    "decode": "Decoding",
    "decode8": "Decoding over 8 bits",
    "masks": "Masks, biases and unequal lengths",
    "backward": "Gradients",
    "fp8": "8 bits",
    "fp8-error": "Errors of 8 bits",
    "generate": "Generating text",
    "regret": "The planner's choice and the fastest variant",
    "costs": "What the planner's costs are found from",
    "refactor": "The standard tables before and after",
    "cpu": "NumPy arrays, one thread,",
}


def write_report(path: Path) -> tuple[Path, Path]:
    """Write the page and the plot of a result file next to it, and return their paths.

    ValueError where the file is not of the agreed shape.
    """
    result = results.read(path)
    page, plot = path.with_suffix(".md"), path.with_suffix(".png")
    plots.draw(result, plot)
    page.write_text(markdown(result, path.name, plot.name), encoding="utf-8")
    return page, plot


def markdown(result: dict[str, Any], source: str, plot: str) -> str:
    """Return the page of a checked result: where it ran, the plot, the ratios, every row.

    `source` and `plot` name the result file and the plot, which lie next to the page.
    """
    bench = result["bench"]
    rows = result["rows"]
    title = f"# {_TITLES.get(bench, bench)} on {result['device']}"
    parts = [title, _origin(result, source), f"![{bench}]({plot})"]
    if bench == "jit":
        parts.append(_jit_table(rows))
    elif bench == "generate":
        parts.append(_generate_table(rows))
    elif bench == "regret":
        parts += [_regret_summary(rows), _regret_table(rows)]
    elif bench == "costs":
        parts.append(_costs_table(result))
    elif bench == "fp8-error":
        parts.append(_fp8_errors(rows))
    elif bench == "models":
        parts += _models_parts(rows)
    elif bench == "refactor":
        words = "How many times as fast cufa is as before, in each family"
        parts += [f"{words}:\n\n{summary(rows, ('family',))}", cell_table(rows, ".3f")]
    else:
        ratios = "How many times as fast as each peer cufa is"
        if bench == "headdims":  # other head dims are other work
            ratios = "How many times the TFLOP/s of each peer cufa has"
        by = tuple(
            n for n in ("case", "mode", "page_size", "feature") if any(n in row for row in rows)
        )
        by = by or ("dtype",)
        of_gradients = bench == "backward"
        best = with_best(rows, BEST) if of_gradients else rows
        parts += [f"{ratios}:\n\n{summary(best, by)}", cell_table(rows)]
        parts += _gaps_parts(rows) if of_gradients else []
        parts += _fp8_parts(rows) if bench == "fp8" else []
    if any("cufa_maxerr" in row for row in rows) and bench != "refactor":
        parts += [error_summary(rows), error_table(rows)]
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
    driver = f"driver {result['driver']}; " if result["driver"] else ""
    lines.append(f"- {driver}{software}")
    if ceilings:
        lines.append(
            f"- ceilings in the same run: read {ceilings['read_gbs']:.0f} GB/s, copy "
            f"{ceilings['copy_gbs']:.0f} GB/s, bf16 matrix product "
            f"{ceilings['gemm_bf16_tflops']:.0f} TFLOP/s"
        )
    return "\n".join(lines)


def _jit_table(rows: Sequence[Row]) -> str:
    lines = [[row["variant"], f"{row['cold_s']:.3f}", f"{row['warm_s']:.3f}"] for row in rows]
    if rows:
        cold, warm = (max(row[key] for row in rows) for key in ("cold_s", "warm_s"))
        lines.append(["**longest**", f"{cold:.3f}", f"{warm:.3f}"])
    return table(["variant", "cold cache, s", "warm disk cache, s"], lines)


def _generate_table(rows: Sequence[Row]) -> str:
    def times(peer: str, row: Row) -> str:
        return f"{ratio(row, peer):.2f}" if peer in row["peers"] else ""

    peers = peer_names(rows)
    columns: Columns = {
        **{name: itemgetter(name) for name in ("model", "dtype", "batch", "prompt", "new")},
        **figures(("cufa", *peers)),
        **{f"cufa/{peer}": partial(times, peer) for peer in peers},
        "bound": lambda row: f"{row['bound']:.1f}",
        "of the bound": lambda row: f"{row['bound_share']:.1%}",
        "attention": lambda row: f"{row['attention_share']:.1%}",
    }
    return f"New tokens a second, of all sequences together:\n\n{table_of(rows, columns)}"


def _models_parts(rows: Sequence[Row]) -> list[str]:
    kinds = [{**row, "shapes": kind_of(row)} for row in with_best(rows, BEST)]
    groups = [*({**row, "shapes": "all"} for row in kinds), *kinds]
    names = ["cufa", *peer_names(rows)]
    columns: Columns = {"model": itemgetter("model"), **CELL, **figures(names, "_host_us")}
    parts = [
        f"How many times as fast as each peer cufa is:\n\n{summary(groups, ('shapes',))}",
        cell_table(kinds),
        f"Time of a call on the host, us:\n\n{table_of(rows, columns)}",
    ]
    slower = [row["batch_invariant"] / row["cufa"] for row in rows]
    parts.append(
        f"With `batch_invariant=True` cufa takes {geomean(slower):.3f} times as long in geometric "
        f"mean, at most {max(slower):.2f}."
    )
    return parts + _gaps_parts(rows)


def _gaps_parts(rows: Sequence[Row]) -> list[str]:
    gaps = Counter(gap for row in rows for gap in row.get("gaps", {}).items())
    if not gaps:
        return []
    lines = [[name, number, why] for (name, why), number in gaps.items()]
    return [f"Peers cannot run these cells:\n\n{table(['peer', 'cells', 'reason'], lines)}"]


def _fp8_parts(rows: Sequence[Row]) -> list[str]:
    names = ["cufa", *peer_names(rows)]
    columns: Columns = {
        **CELL,
        "from 16 bits": lambda row: f"{row['from_16_bits']:.1f}",
        "by cufa_bf16": _times_16_bits,
        "quantize, GB/s": lambda row: f"{row['quantize_gbs']:.0f}",
        "of a copy": lambda row: f"{row['quantize_gbs'] / row['copy_gbs']:.2f}",
        **figures(names, "_rmse", " rmse", ".2e"),
    }
    text = "With the quantization of q, k and v, TFLOP/s; and root mean square errors:"
    return [f"{text}\n\n{table_of(rows, columns)}"]


def _fp8_errors(rows: Sequence[Row]) -> str:
    columns: Columns = {
        **{name: itemgetter(name) for name in ("data", "d", "s", "kernel")},
        "scales": itemgetter("granularity"),
        "transform": lambda row: "yes" if row["hadamard"] else "no",
        "rmse": lambda row: f"{row['rmse']:.2e}",
        "of the result": lambda row: f"{row['relative']:.2%}",
        "found": lambda row: f"{row['found']}/{row['draws']}" if "found" in row else "",
    }
    text = (
        "Root mean square errors against float64; in part of the data, by the root mean square of "
        "the worst chunk of rows:"
    )
    return f"{text}\n\n{table_of(rows, columns)}"


def _times_16_bits(row: Row) -> str:
    """Return how many times as fast cufa is, quantization included, as in 16 bits."""
    other = row["peers"].get("cufa_bf16")
    return "" if other is None else f"{row['from_16_bits'] / other:.2f}"


def _regret_summary(rows: Sequence[Row]) -> str:
    lines = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        quotients = [regret(row) for row in rows if row["seed"] == seed]
        figures = (f"{each:.3f}" for each in (geomean(quotients), max(quotients)))
        lines.append([seed, len(quotients), *figures])
    text = "Time of the planner's choice, by that of the fastest variant:"
    return f"{text}\n\n{table(['seed', 'problems', 'geometric mean', 'largest'], lines)}"


def _costs_table(result: Mapping[str, Any]) -> str:
    gpu, lines = cost_fit.gpu_of(result), []
    for key, some in cost_fit.by_key(result["rows"], gpu).items():
        d, dv, causal = key
        found = cost_fit.forecasts(some, COSTS[key], gpu)
        errors = [
            abs(x.predicted[name] / x.measured[name] - 1)
            for x in found
            for name in x.predicted.keys() & x.measured.keys()
        ]
        nine_of_ten = statistics.quantiles(errors, n=10)[-1]
        losses = [each.loss() for each in found]
        words = f"{d}/{dv}" + ", causal" * causal
        wide = f"{statistics.median(errors):.1%}", f"{nine_of_ten:.1%}"
        lines.append([words, len(some), *wide, f"{geomean(losses):.3f}", f"{max(losses):.2f}"])
    heads = ["head dims", "problems", "error, median", "nine of ten below"]
    text = (
        "Times that the planner predicts, and the time of what it chooses by that of the fastest of"
        " all:"
    )
    return f"{text}\n\n{table([*heads, 'geometric mean', 'largest'], lines)}"


def _regret_table(rows: Sequence[Row]) -> str:
    def tile(name: str, row: Row) -> str:
        return tile_text(Variant.parse(row[name]))

    columns: Columns = {
        **CELL,
        "variants": itemgetter("variants"),
        "planned": partial(tile, "planned"),
        "us": lambda row: f"{row['planned_us']:.2f}",
        "fastest": partial(tile, "best"),
        "us, fastest": lambda row: f"{row['best_us']:.2f}",
        "quotient": lambda row: f"{regret(row):.3f}",
    }
    ordered = sorted(rows, key=regret, reverse=True)
    text = "Every problem, the worst first; a tile is rows x keys stages/warps/blocks:"
    return f"{text}\n\n{table_of(ordered, columns)}"
