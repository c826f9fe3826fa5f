"""Rows of an exploration as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cufa.explorer.result import Row
from cufa.problem.problem import Problem
from cufa.specs.tile_shape import TileShape
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from cufa.explorer.exploration import Exploration


def _shown(value: Any, form: str = "", factor: float = 1) -> str:
    return "-" if value is None else format(value * factor, form)


def _kib(*sizes: int | None) -> str:
    known = [size for size in sizes if size is not None]
    return format(sum(known) / 1024, ".1f") if known else "-"


def _head_dims(row: Row) -> str:
    d, dv = row.variant.head_dim, row.variant.head_dim_v
    return str(d) if d == dv else f"{d}/{dv}"


def flags(variant: Variant) -> str:
    """Return the names of a variant's free template arguments that are switched on."""
    return " ".join(name for name in TileShape._fields if getattr(variant, name) is True)


def tile_text(variant: Variant) -> str:
    """Return a variant's kernel and free template arguments in few words."""
    v = variant
    return f"{v.kernel} {v.bm}x{v.bn} {v.stages}/{v.warps}/{v.blocks_per_sm} {flags(v)}".rstrip()


_STATIC: dict[str, Callable[[Row], str]] = {
    "kernel": lambda r: f"{r.variant.kernel} {flags(r.variant)}".rstrip(),
    "dim": _head_dims,
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
_EXPECTED: dict[str, Callable[[Row], str]] = {
    "expected us": lambda r: _shown(r.expected_us, ".1f"),
}
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


def _columns(timed: bool) -> dict[str, Callable[[Row], str]]:
    return {**_STATIC, **(_MEASURED if timed else _EXPECTED)}


def headers(timed: bool) -> list[str]:
    """Return the headings of `cells`."""
    return [*_columns(timed), ""]


def cells(row: Row, timed: bool, planned: Variant | None = None) -> list[str]:
    """Return a row as text; the last cell is its `remark`."""
    return [*(show(row) for show in _columns(timed).values()), remark(row, planned)]


def problem_text(problem: Problem) -> str:
    """Return a problem in few words."""
    p = problem
    heads = f"{p.heads_q}" if p.heads_q == p.heads_kv else f"{p.heads_q}/{p.heads_kv}"
    seq = f"{p.seq_q}" if p.seq_q == p.seq_kv else f"{p.seq_q}/{p.seq_kv}"
    dim = f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"{p.head_dim}/{p.head_dim_v}"
    features = "".join(f", {feature.words}" for feature in p.features)
    lse = ", log-sum-exp" if p.returns_lse else ""
    return f"{p.dtype}, batch {p.batch}, heads {heads}, seq {seq}, head dim {dim}{features}{lse}"


def aligned(lines: Iterable[Sequence[str]]) -> str:
    """Return columns of text, the first and the last to the left, the others to the right."""
    lines = list(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    last = len(widths) - 1
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 kernel", "2 kernels"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def heading(findings: Exploration) -> str:
    """Return two lines on what was explored, and where."""
    return (
        f"{problem_text(findings.problem)}\n"
        f"{counted(len(findings.rows), 'variant')} for {findings.arch} ({findings.device.name}), "
        f"{findings.compiler}, {findings.seconds:.0f} s; planned: {findings.planned}"
    )


def text(findings: Exploration) -> str:
    """Return the findings as a heading and a table."""
    rows = (cells(row, findings.timed, findings.planned) for row in findings.rows)
    lines = aligned([headers(findings.timed), *rows])
    return f"{heading(findings)}\n\n{lines}"
