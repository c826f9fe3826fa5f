"""The package as it was: an older cufa next to the present one, in one process."""

from __future__ import annotations

import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from benchmarks.environment import ROOT

NAME = "cufa_before"
"""The older package's name here, so that its imports find its own modules at any time."""


def resolve(before: str) -> str:
    """Return what a result file calls the older package: its commit, or the name of its folder.

    Parameters
    ----------
    before : str
        A folder that holds a package ``cufa``, or a revision that git knows.

    Raises
    ------
    ValueError
        It is neither.
    """
    folder = Path(before)
    if folder.is_dir():
        if not (folder / "cufa" / "__init__.py").is_file():
            raise ValueError(f"--before: the folder {before!r} holds no package cufa")
        return folder.resolve().name
    try:
        return _git("rev-parse", "--verify", "--quiet", f"{before}^{{commit}}").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(f"--before: {before!r} is no folder and no revision of git's") from None


@contextmanager
def loaded(before: str) -> Iterator[ModuleType]:
    """Give the older package, imported under `NAME`; its files are there as long.

    Parameters
    ----------
    before : str
        As in `resolve`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        _unpack(before, Path(temporary))
        sys.path.insert(0, temporary)
        importlib.invalidate_caches()
        try:
            yield importlib.import_module(NAME)
        finally:
            sys.path.remove(temporary)
            for name in [n for n in sys.modules if n.split(".")[0] == NAME]:
                del sys.modules[name]


@contextmanager
def beside(before: str) -> Iterator[ModuleType]:
    """Give the older package as `loaded` does, to be timed against the present one.

    Neither finds what a user has tuned, or compiled ahead of time, which is one's.

    Parameters
    ----------
    before : str
        As in `resolve`.
    """
    with loaded(before) as package, tempfile.TemporaryDirectory() as empty:
        given = os.environ.get("CUFA_CACHE_DIR")
        os.environ["CUFA_CACHE_DIR"] = empty
        try:
            yield package
        finally:
            del os.environ["CUFA_CACHE_DIR"]
            if given is not None:
                os.environ["CUFA_CACHE_DIR"] = given


def _unpack(before: str, into: Path) -> None:
    """Put the older package into a folder, under its other name."""
    if Path(before).is_dir():
        shutil.copytree(Path(before) / "cufa", into / "cufa")
    else:
        archive = _git("archive", "--format=zip", before, "cufa")
        zipfile.ZipFile(io.BytesIO(archive)).extractall(into)
    package = (into / "cufa").rename(into / NAME)
    for path in package.rglob("*.py"):
        path.write_text(_renamed(path.read_text(encoding="utf-8")), encoding="utf-8")


def _renamed(text: str) -> str:
    """Return a module's text with its imports, and the names of its resources, under `NAME`."""
    text = re.sub(r"^(\s*from )cufa\b", rf"\1{NAME}", text, flags=re.MULTILINE)
    return text.replace('"cufa.', f'"{NAME}.')


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, timeout=60
    ).stdout
