"""The user's tuned table on disk: which tile won when problems were timed on this GPU."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from cufa import disk_cache
from cufa.compiler import source
from cufa.device import Device
from cufa.planner.problem_class import ProblemClass
from cufa.planner.tuned_table import Entry, Table, dump, parse
from cufa.warned import warn


def table_name(device_name: str) -> str:
    """Return the name of a GPU's table: "h200" for "NVIDIA H200"."""
    name = device_name.lower().removeprefix("nvidia ")
    return re.sub("[^a-z0-9]+", "-", name).strip("-")


def user_path(device: Device) -> Path:
    """Return where the user's table for a device is, or would be.

    Parameters
    ----------
    device : Device

    Raises
    ------
    OSError
        As `disk_cache.folder`.
    """
    return disk_cache.folder() / "tuned" / f"{table_name(device.name)}.json"


def _ignored(path: Path, why: str) -> None:
    warn(f"{path} is ignored: {why}. Write it again with python -m cufa tune, or delete it")


def load(path: Path) -> Table | None:
    """Read a table; None if there is none, with a warning if it is damaged or not to be trusted.

    Parameters
    ----------
    path : Path
        In the cache folder.
    """
    data = disk_cache.read(path)
    if data is None:
        return None
    try:
        return parse(data.decode())
    except (ValueError, RecursionError) as e:
        _ignored(path, str(e))
        return None


@functools.cache
def user_table(device: Device) -> Table | None:
    """Return the user's table for a device, or None.

    It is read once. None also with CUFA_TUNED=0, and if the kernels are not those that were timed.

    Parameters
    ----------
    device : Device
    """
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


def forget() -> None:
    """Read the tables again for the next plan; calls like those already made keep their plans."""
    user_table.cache_clear()


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
        The command that found them, for the reader of the file.
    drop : collection of ProblemClass
        Classes whose older entries no longer win.

    Raises
    ------
    OSError
    """
    path = user_path(device)
    kept: dict[ProblemClass, Entry] = {}
    with contextlib.suppress(ValueError, RecursionError):  # a damaged table is replaced
        old = parse((disk_cache.read(path) or b"").decode())
        kept = old.entries if old.sources == source.digest() else {}
    table = Table(
        device=device.name,
        sources=source.digest(),
        date=datetime.date.today().isoformat(),
        command=command,
        entries={**{key: kept[key] for key in kept if key not in drop}, **entries},
    )
    disk_cache.write(path, dump(table).encode())
    forget()
    return path
