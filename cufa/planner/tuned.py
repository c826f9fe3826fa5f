"""Tuned tables: which tile won when problems like this one were timed on this GPU.

The user's table, in the cache folder, holds as long as the kernels are those that were timed. The
built-in ones, in ``cufa/tables``, come with the package.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from cufa.compiler import cache, source
from cufa.device import Device
from cufa.kernel import KERNELS
from cufa.planner.problem_class import ProblemClass, problem_class
from cufa.planner.tuned_table import VERSION, Entry, Table, dump, parse
from cufa.problem import Problem

__all__ = [
    "VERSION",
    "Entry",
    "ProblemClass",
    "Table",
    "forget",
    "load",
    "lookup",
    "problem_class",
    "store",
    "table_name",
    "tables",
    "user_path",
]

_BUILTIN = Path(__file__).parents[1] / "tables"


def table_name(device_name: str) -> str:
    """Return the name of a GPU's table: "h200" for "NVIDIA H200"."""
    name = device_name.lower().removeprefix("nvidia ")
    return re.sub("[^a-z0-9]+", "-", name).strip("-")


def user_path(device: Device) -> Path:
    """Return where the user's table for a device is, or would be.

    Raises
    ------
    OSError
        As `cache.folder`.
    """
    return cache.folder() / "tuned" / f"{table_name(device.name)}.json"


def _ignored(path: Path, why: str) -> None:
    warnings.warn(
        f"{path} is ignored: {why}. Write it anew with python -m cufa tune, or delete it",
        RuntimeWarning,
        stacklevel=2,
    )


def load(path: Path) -> Table | None:
    """Read a table; None if there is none, with a warning if it is damaged or not to be trusted.

    Parameters
    ----------
    path : Path
        In the cache folder.
    """
    data = cache.read(path)
    return None if data is None else _parsed(path, data)


def _parsed(path: Path, data: bytes) -> Table | None:
    try:
        return parse(data.decode())
    except (ValueError, RecursionError) as e:
        _ignored(path, str(e))
        return None


@functools.cache
def _user_table(device: Device) -> Table | None:
    if os.environ.get("CUFA_TUNED") == "0":
        return None
    try:
        path = user_path(device)
    except OSError:
        return None
    table = load(path)
    if table is not None and table.sources != source.digest():
        _ignored(path, "the kernels have changed since")
        return None
    return table


@functools.cache
def _builtin_table(name: str) -> Table | None:
    path = _BUILTIN / f"{name}.json"
    try:
        return _parsed(path, path.read_bytes())
    except OSError:
        return None


def forget() -> None:
    """Read the tables anew for the next plan; calls like those already made keep their plans."""
    _user_table.cache_clear()
    _builtin_table.cache_clear()


def tables(device: Device) -> Iterator[tuple[Table, str]]:
    """Yield the tables for a device, and whose each is; the first is asked first."""
    name = table_name(device.name)
    user, builtin = _user_table(device), _builtin_table(name)
    if user is not None:
        yield user, "user's table"
    if builtin is not None:
        yield builtin, f"built-in table of {name}"


def lookup(
    problem: Problem, device: Device, kernel_default: str, forced: bool
) -> tuple[Entry, str] | None:
    """Find what a problem should run, and say where that comes from.

    Parameters
    ----------
    problem : Problem
    device : Device
    kernel_default : str
        The kernel that the plan uses without a table.
    forced : bool
        Whether the caller asked for that kernel: then no other will do.

    Returns
    -------
    tuple of Entry and str, or None
    """
    key = problem_class(problem, device)
    for table, whose in tables(device):
        entry = table.entries.get(key)
        kernel = None if entry is None else KERNELS.get(entry.kernel)
        if entry is None or kernel is None:
            continue
        if problem.dtype not in kernel.dtypes or not kernel.runs_on(device):
            continue
        # A choice between kernels holds only between those that were timed.
        known = not forced and table.sources == source.digest()
        if entry.kernel != kernel_default and not known:
            continue
        if entry.variant(problem, device).illegal(device) is None:
            return entry, f"tuned on {table.date} ({whose})"
    return None


def store(
    device: Device,
    entries: Mapping[ProblemClass, Entry],
    command: str,
    drop: Collection[ProblemClass] = (),
) -> Path:
    """Put entries into the user's table for a device, and return its file.

    Older entries stay, unless the kernels have changed since or `drop` has their class.

    Parameters
    ----------
    device : Device
    entries : mapping of ProblemClass to Entry
    command : str
        What found them, for the reader of the file.
    drop : collection of ProblemClass
        Classes whose older entries no longer win.

    Raises
    ------
    OSError
    """
    path = user_path(device)
    kept: dict[ProblemClass, Entry] = {}
    with contextlib.suppress(ValueError, RecursionError):  # a damaged table is replaced
        old = parse((cache.read(path) or b"").decode())
        kept = old.entries if old.sources == source.digest() else {}
    table = Table(
        device=device.name,
        sources=source.digest(),
        date=datetime.date.today().isoformat(),
        command=command,
        entries={**{key: kept[key] for key in kept if key not in drop}, **entries},
    )
    cache.write(path, dump(table).encode())
    forget()
    return path
