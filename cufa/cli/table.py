"""Text in columns on the standard output: with rich on a terminal, plain otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from cufa.explorer.table import aligned


def size_text(size_bytes: int) -> str:
    """Return a size in the unit that suits it."""
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def pairs(rows: Sequence[Sequence[object]]) -> None:
    """Print rows of a name, a value and perhaps a note, which stand below each other."""
    names = max(len(str(row[0])) for row in rows)
    values = max((len(str(row[1])) for row in rows if len(row) > 2), default=0)
    for name, value, *note in rows:
        text = f"{value!s:<{values}}  {note[0]}" if note else str(value)
        print(f"{name!s:<{names}}  {text}".rstrip())


def rich_table(lines: Sequence[Sequence[str]]) -> Any:
    """Return lines, of which the first has headings, as a table of rich, which must be there."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    headers, *rows = lines
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for i, header in enumerate(headers):
        shown.add_column(header, justify="left" if i in (0, len(headers) - 1) else "right")
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def console(stream: Any) -> Any:
    """Return rich's console on a stream that is a terminal; None without rich or terminal."""
    if stream is None or not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream)


def fits(console: Any, lines: Sequence[Sequence[str]]) -> bool:
    """Whether a table of rich is not too wide; a last column of remarks may be cut."""
    width = console.measure(rich_table([line[:-1] for line in lines])).maximum
    return bool(width < console.width)


def show(lines: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    terminal = console(sys.stdout)
    if terminal is not None and fits(terminal, lines):
        terminal.print(rich_table(lines))
    else:
        print(aligned(lines))
