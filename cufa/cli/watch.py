"""Progress of an exploration on the standard error: live on a terminal, else line by line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cufa.cli import table
from cufa.explorer import Progress
from cufa.explorer.result import Row, ranked
from cufa.explorer.table import lines, problem_text, remark
from cufa.problem.problem import Problem
from cufa.specs.variant import Variant

_DONE = {"compile": "compiled", "check": "checked", "time": "timed"}
# Lines of a terminal that the live table leaves free: for title, bars, header and prompt.
_MARGIN = 9


@contextmanager
def watch() -> Iterator[Lines | Live]:
    """Yield what suits the standard error: lines, or a live table that is gone at the end."""
    console = table.console(sys.stderr)
    if console is None:
        yield Lines()
    else:
        shown = Live(console)
        with shown.table:
            yield shown


class Lines:
    """One line a step."""

    def begin_problem(self, done: int, total: int, problem: Problem) -> None:
        """Print which problem of several comes now."""
        print(_title(done, total, problem), file=sys.stderr)

    def __call__(self, progress: Progress) -> None:
        """Print a step."""
        position = f"{_DONE[progress.stage]} {progress.done}/{progress.total}"
        print(f"{position}  {progress.row.variant}  {_said(progress.row)}", file=sys.stderr)


def _title(done: int, total: int, problem: Problem) -> str:
    return f"problem {done + 1}/{total}: {problem_text(problem)}"


def _said(row: Row) -> str:
    """Return the last that was found of a variant, in few words."""
    if row.error is not None or row.correct is False:
        return remark(row)
    if row.median_us is not None:
        return f"{row.median_us:.1f} us"
    if row.correct:
        return f"correct, largest error {row.max_error:.1e}"
    spills = f"{row.spill_bytes} bytes spilled" if row.spill_bytes else "no spills"
    return f"{row.registers} registers, {spills}, {row.occupancy:.0%} occupancy"


class Live:
    """A bar of the stage and a table of the rows so far, best first, both gone at the end."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live as RichLive
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._console = console
        self._title = ""
        self._rows: dict[Variant, Row] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Bar(*columns, TimeElapsedColumn(), console=console)
        self._tasks: dict[str, Any] = {}
        self.table = RichLive(
            console=console, get_renderable=self._shown, refresh_per_second=4, transient=True
        )

    def begin_problem(self, done: int, total: int, problem: Problem) -> None:
        """Start again, under the name of the next of several problems."""
        self._title = _title(done, total, problem)
        self._rows.clear()
        for task in self._tasks.values():
            self._bar.remove_task(task)
        self._tasks.clear()

    def __call__(self, progress: Progress) -> None:
        """Take a step into the bar and the table."""
        self._rows[progress.row.variant] = progress.row
        stage = progress.stage
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=progress.total)
        self._bar.update(self._tasks[stage], completed=progress.done, total=progress.total)

    def _shown(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        rows = ranked(list(self._rows.values()))[: max(1, self._console.height - _MARGIN)]
        parts: list[Any] = [Text(self._title), self._bar] if self._title else [self._bar]
        if rows:
            if table.fits(self._console, lines(rows)):
                parts.append(table.rich_table(lines(rows)))
            else:
                text = "\n".join(f"{row.variant}  {_said(row)}" for row in rows)
                parts.append(Text(text, no_wrap=True, overflow="ellipsis"))
        return Group(*parts)
