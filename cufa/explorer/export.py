"""Explorations as plain values, JSON and CSV."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cufa.variant import Variant

if TYPE_CHECKING:
    from cufa.explorer.result import Exploration, Row

VERSION = 1

# The template argument blocks_per_sm is what was asked for, the figure of that name what fits.
_COLUMN_OF_ARGUMENT = {name: name for name in Variant._fields}
_COLUMN_OF_ARGUMENT["blocks_per_sm"] = "min_blocks_per_sm"


def flat(row: Row) -> dict[str, Any]:
    """Return a row as one flat mapping; numbers that JSON has not, such as infinity, are None."""
    whole = {_COLUMN_OF_ARGUMENT[k]: v for k, v in row.variant._asdict().items()}
    whole |= {name: value for name, value in row._asdict().items() if name != "variant"}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in {**whole, "notes": list(row.notes)}.items()
    }


def as_dict(exploration: Exploration) -> dict[str, Any]:
    """Return an exploration as plain values."""
    e = exploration
    return {
        "version": VERSION,
        "date": e.date,
        "seconds": round(e.seconds, 2),
        "device": e.device._asdict(),
        "arch": e.arch,
        "compiler": e.compiler,
        "problem": e.problem._asdict(),
        "planned": str(e.planned),
        "ceilings": e.ceilings,
        "rows": [flat(row) for row in e.rows],
    }


def as_json(exploration: Exploration) -> str:
    """Return an exploration as JSON, a row a line."""
    import json

    whole = as_dict(exploration)
    rows = ",\n    ".join(json.dumps(row, allow_nan=False) for row in whole.pop("rows"))
    head = json.dumps(whole, indent=2, allow_nan=False).removesuffix("\n}")
    return f'{head},\n  "rows": [\n    {rows}\n  ]\n}}\n'


def as_csv(exploration: Exploration) -> str:
    """Return the rows as CSV with a line of headings; what is not known is empty."""
    import csv
    import io

    from cufa.explorer.result import Row

    figures = (name for name in Row._fields if name != "variant")
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*_COLUMN_OF_ARGUMENT.values(), *figures], lineterminator="\n")
    writer.writeheader()
    for row in exploration.rows:
        writer.writerow({**flat(row), "notes": "; ".join(row.notes)})
    return stream.getvalue()


def written(text: str, path: str | Path | None) -> str:
    """Write a text into a file if there is one, and return it."""
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
