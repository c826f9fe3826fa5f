"""A tuned table, the best tile of each class of problems on one GPU, as a value and as JSON."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, TypeVar, get_type_hints

from cufa.device import Device
from cufa.features.parts import PARTS
from cufa.planner.problem_class import ProblemClass
from cufa.problem.problem import Problem
from cufa.specs import KERNELS
from cufa.specs.kernel_spec import TileShape
from cufa.specs.variant import Variant

VERSION = 2


class Entry(NamedTuple):
    """The variant of a class: a kernel and its free template arguments."""

    kernel: str
    shape: TileShape

    def variant(self, problem: Problem, device: Device) -> Variant:
        """Return the instantiation for a problem; it may be illegal on the device.

        The kernel must run there.
        """
        dims = KERNELS[self.kernel].padded(device, problem.head_dim, problem.head_dim_v)
        return Variant(*(self.kernel, problem.dtype, *dims, *self.shape), score=problem.score)


class Table(NamedTuple):
    """The entries of one GPU, and where they come from.

    Attributes
    ----------
    device : str
    sources : str
        `cufa.compiler.source.digest` of the kernels that were timed.
    date : str
        ISO day.
    command : str
        The command that wrote the table.
    entries : dict of ProblemClass to Entry
    """

    device: str
    sources: str
    date: str
    command: str
    entries: dict[ProblemClass, Entry]

    @property
    def reason(self) -> str:
        """Why a plan has a variant of the table."""
        return f"tuned on {self.date} (user's table)"


_Fields = TypeVar("_Fields", ProblemClass, TileShape)


_SCORE = tuple[str, ...]


def _checked(data: dict[str, Any], name: str, kind: Any) -> Any:
    value = data.get(name)
    if isinstance(value, list) and kind == _SCORE and all(each in list(PARTS) for each in value):
        return tuple(value)
    if type(value) is not kind:  # a bool is no number here
        raise ValueError(f"{name} is {value!r}")
    return value


def _fields(data: dict[str, Any], into: type[_Fields]) -> _Fields:
    """Return a row's part that is such a tuple; a field with a default may be left out."""
    kinds = get_type_hints(into)
    known = {**into._field_defaults, **data}
    return into(**{name: _checked(known, name, kinds[name]) for name in into._fields})


def _row(data: object) -> tuple[ProblemClass, Entry]:
    if not isinstance(data, dict):
        raise ValueError(f"an entry is {data!r}")
    entry = Entry(_checked(data, "kernel", str), _fields(data, TileShape))
    return _fields(data, ProblemClass), entry


def parse(text: str) -> Table:
    """Read a table's JSON.

    Raises
    ------
    ValueError
        It is damaged, or of another version.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("it holds no table")
    version = data.get("version")
    if version != VERSION:
        raise ValueError(f"its version is {version!r}, not {VERSION}")
    about = (_checked(data, name, str) for name in Table._fields[:-1])
    return Table._make((*about, dict(map(_row, _checked(data, "entries", list)))))


def dump(table: Table) -> str:
    """Return a table's JSON: one entry a line, sorted, so that two tables compare well."""
    about = {"version": VERSION, **dict(zip(Table._fields[:-1], table, strict=False))}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in about.items()]
    rows = [
        "    " + json.dumps({**key._asdict(), "kernel": entry.kernel, **entry.shape._asdict()})
        for key, entry in sorted(table.entries.items())
    ]
    return "\n".join(["{", *lines, '  "entries": [', ",\n".join(rows), "  ]", "}", ""])
