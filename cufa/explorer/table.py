"""Rows of an exploration as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cufa.explorer.result import Findings, Row
from cufa.problem.problem import Problem
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant


def _shown(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def _kib(*sizes: int | None) -> str:
    known = [size for size in sizes if size is not None]
    return format(sum(known) / 1024, ".1f") if known else "-"


def _both(first: int, second: int) -> str:
    """Return two numbers, or one if they are the same."""
    return str(first) if first == second else f"{first}/{second}"


def flags(variant: Variant) -> str:
    """Return the names of a variant's free template arguments that are switched on."""
    return " ".join(name for name in TileShape._fields if getattr(variant, name) is True)


def tile_text(variant: Variant) -> str:
    """Return a variant's kernel and free template arguments in few words."""
    v = variant
    return f"{v.kernel} {v.bm}x{v.bn} {v.stages}/{v.warps}/{v.blocks_per_sm} {flags(v)}".rstrip()


_STATIC: dict[str, Callable[[Row], str]] = {
    "kernel": lambda r: f"{r.variant.kernel} {flags(r.variant)}".rstrip(),
    "dim": lambda r: _both(r.variant.head_dim, r.variant.head_dim_v),
    "tile": lambda r: f"{r.variant.bm}x{r.variant.bn}",
    "stages": lambda r: str(r.variant.stages),
    "warps": lambda r: str(r.variant.warps),
    "bound": lambda r: str(r.variant.blocks_per_sm),
    "regs": lambda r: _shown(r.registers),
    "spill B": lambda r: _shown(r.spill_bytes),
    "smem KiB": lambda r: _kib(r.static_smem_bytes, r.dynamic_smem_bytes),
    "blocks/SM": lambda r: _shown(r.blocks_per_sm),
    "occup.": lambda r: _shown(r.occupancy, ".0%"),
    "code KiB": lambda r: _kib(r.code_bytes),
    "compile s": lambda r: _shown(r.compile_s, ".2f"),
}
_EXPECTED: dict[str, Callable[[Row], str]] = {"expected us": lambda r: _shown(r.expected_us, ".1f")}
_MEASURED: dict[str, Callable[[Row], str]] = {
    "us": lambda r: _shown(r.median_us, ".1f"),
    "spread": lambda r: _shown(r.spread, ".1%"),
    "TFLOP/s": lambda r: _shown(r.tflops, ".1f"),
    "GB/s": lambda r: _shown(r.gbs, ".0f"),
    "ceiling": lambda r: _shown(r.ceiling_fraction, ".0%"),
    "max error": lambda r: _shown(r.max_error, ".1e"),
}


def remark(row: Row, planned: Variant | None = None) -> str:
    """Return a row's error, or whether it is planned, whether it is wrong, and ptxas's notes."""
    if row.error is not None:
        return row.error
    plan = ("planned",) if row.variant == planned else ()
    wrong = ("wrong result",) if row.correct is False else ()
    return "; ".join((*plan, *wrong, *row.notes))


def lines(rows: Sequence[Row], planned: Variant | None = None) -> list[list[str]]:
    """Return the headings of a table, and a line for each row, whose last cell is its `remark`."""
    timed = any(row.median_us is not None for row in rows)
    columns = {**_STATIC, **(_MEASURED if timed else _EXPECTED)}
    shown = ([*(show(row) for show in columns.values()), remark(row, planned)] for row in rows)
    return [[*columns, ""], *shown]


def problem_text(problem: Problem) -> str:
    """Return a problem in few words."""
    p = problem
    heads, seq = _both(p.heads_q, p.heads_kv), _both(p.seq_q, p.seq_kv)
    dim, features = _both(p.head_dim, p.head_dim_v), [feature.words for feature in p.features]
    words = [p.dtype, f"batch {p.batch}", f"heads {heads}", f"seq {seq}", f"head dim {dim}"]
    return ", ".join([*words, *features, *["log-sum-exp"] * p.returns_lse])


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return columns of text, the first and the last to the left, the others to the right."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    last = len(widths) - 1
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 kernel", "2 kernels"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def heading(findings: Findings) -> str:
    """Return two lines on what was explored, and where."""
    return (
        f"{problem_text(findings.problem)}\n"
        f"{counted(len(findings.rows), 'variant')} for {findings.arch} ({findings.device.name}), "
        f"{findings.compiler}, {findings.seconds:.0f} s; planned: {findings.planned}"
    )
