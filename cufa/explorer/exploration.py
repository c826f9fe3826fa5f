"""The result of `cufa.explore`: findings, and their exports as text, JSON, CSV and a figure."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cufa.explorer.plot import figure
from cufa.explorer.result import Findings, Row
from cufa.explorer.table import aligned, heading, lines
from cufa.specs.variant import Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 3

# The template argument blocks_per_sm is what was asked for, the figure of that name what fits.
_RENAMED = {"blocks_per_sm": "min_blocks_per_sm"}
_COLUMNS = (*(_RENAMED.get(name, name) for name in Variant._fields), *Row._fields[1:])


def flat(row: Row) -> dict[str, Any]:
    """Return a row as one flat mapping of values that JSON can hold."""
    variant, *figures = row
    arguments = {**variant._asdict(), "schedule": variant.named_schedule}
    values = map(_plain, (*arguments.values(), *figures))
    return dict(zip(_COLUMNS, values, strict=True))


def _plain(value: Any) -> Any:
    """Return a list for a tuple, and None for numbers that JSON has not, such as infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(value) if isinstance(value, tuple) else value


class Exploration(Findings):
    """The result of `cufa.explore`.

    Attributes
    ----------
    problem : Problem
    device : Device
    arch : str
        The architecture that the variants were compiled for.
    rows : list of Row
        Given in any order, and brought into that of `ranked`.
    planned : Variant
        The planner's choice for the problem; among the explored kernels if its own is not one of
        them.
    compiler : str
        Such as "NVRTC 13.0".
    ceilings : dict of str to float or None
        "read_gbs", "copy_gbs" and, with cuBLAS, "gemm_tflops", measured with the variants.
    seconds : float
        How long it took.
    date : str
        ISO day.
    """

    def __repr__(self) -> str:
        """One line."""
        return f"<Exploration of {len(self.rows)} variants for {self.arch} on {self.date}>"

    def __str__(self) -> str:
        """Return a table as plain text."""
        return f"{heading(self)}\n\n{aligned(lines(self.rows, self.planned))}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold; a row is flat.

        Returns
        -------
        dict of str to object
            "version" of the format, "date", "seconds", "device", "arch", "compiler", "problem",
            "planned", "ceilings", and "rows", a dict each. A row's `Variant.blocks_per_sm` is
            "min_blocks_per_sm" there.
        """
        return {
            "version": VERSION,
            "date": self.date,
            "seconds": round(self.seconds, 2),
            "device": self.device._asdict(),
            "arch": self.arch,
            "compiler": self.compiler,
            "problem": self.problem.to_dict(),
            "planned": str(self.planned),
            "ceilings": self.ceilings,
            "rows": [flat(row) for row in self.rows],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return `to_dict` as JSON, a row a line, and write it if a path is given.

        Parameters
        ----------
        path : str or Path, optional
            Where to write it.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        whole = self.to_dict()
        rows = ",\n    ".join(json.dumps(row, allow_nan=False) for row in whole.pop("rows"))
        head = json.dumps(whole, indent=2, allow_nan=False).removesuffix("\n}")
        return _written(f'{head},\n  "rows": [\n    {rows}\n  ]\n}}\n', path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the rows as CSV with a line of headings; what is not known is empty.

        Parameters
        ----------
        path : str or Path, optional
            As for `to_json`.
        """
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for row in self.rows:
            values = flat(row).values()
            writer.writerow("; ".join(x) if isinstance(x, list) else x for x in values)
        return _written(stream.getvalue(), path)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the variants and return the figure; needs matplotlib.

        With timings: the time of each tile, and a roofline. Without: registers and occupancy.

        Parameters
        ----------
        path : str or Path, optional
            Where to write it; the suffix names the format.

        Raises
        ------
        ImportError
            Without matplotlib.
        ValueError
            matplotlib does not know the format.
        OSError
            The file cannot be written.
        """
        drawn = figure(self)
        if path is not None:
            drawn.savefig(path, dpi=150)
        return drawn


def _written(content: str, path: str | Path | None) -> str:
    """Write a text into a file if there is one, and return it."""
    if path is not None:
        Path(path).write_text(content, encoding="utf-8")
    return content


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during an exploration.

    Attributes
    ----------
    exploration : Exploration
        The findings until then.
    """

    def __init__(self, exploration: Exploration) -> None:
        super().__init__(f"interrupted after {len(exploration.rows)} variants")
        self.exploration = exploration
