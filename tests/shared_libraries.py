"""Shared libraries made of C++, kept outside of test runs by all that they are made of."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import posixpath
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
#: Warnings are NVRTC's affair: its pragmas are unknown here.
OPTIONS = ("-std=c++17", "-Og", "-w", "-fPIC")
#: After which a library that nobody used is deleted.
KEPT_SECONDS = 7 * 86400

_INCLUDE = re.compile(r'^#include "([\w./]+)"$', re.MULTILINE)


@functools.cache
def cache() -> Path:
    """Return the folder of libraries, without those that were not used for long."""
    named = os.environ.get("CUFA_TESTS_CACHE")
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(named or f"{user}/cufa-tests")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home
        folder = Path(tempfile.gettempdir()) / f"cufa-tests-{os.getuid()}"
        folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        try:
            if path.stat().st_mtime < time.time() - KEPT_SECONDS:
                path.unlink()
        except OSError:  # another process was first
            pass
    return folder


class Sources:
    """Files of C++ that include each other.

    Parameters
    ----------
    *folders : Path
        A file of a later one takes the place of its namesake in an earlier one.
    own : mapping of str to str
        Texts of others, by name.
    precompiled : str, optional
        Name of a header that texts begin with.
    """

    def __init__(
        self, *folders: Path, own: Mapping[str, str] | None = None, precompiled: str | None = None
    ) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): path.read_text()
            for folder in folders
            for path in folder.rglob("*")
            if path.suffix in (".cu", ".cuh", ".h", ".cpp")
        } | dict(own or {})
        self._precompiled = precompiled

    def text(self, top: str) -> str:
        """Return a text and all files that it includes, each once."""
        done: dict[str, str] = {}

        def add(text: str, folder: str) -> None:
            for include in _INCLUDE.findall(text):
                beside = posixpath.normpath(posixpath.join(folder, include))
                name = beside if beside in self._files else include
                if name not in done and name in self._files:
                    done[name] = self._files[name]
                    add(done[name], posixpath.dirname(name))

        add(top, "")
        return "".join(f"{name}\0{text}\0" for name, text in sorted(done.items())) + top

    def library(self, top: str, *options: str) -> Path:
        """Return the library of a text, which is compiled if no process has done so before."""
        library = _kept(self.text(top), ".so", options)
        if library.exists():
            os.utime(library)
            return library
        header = self._precompiled and self._header(self._precompiled, options)
        with _alone(library), tempfile.TemporaryDirectory() as name:
            if not library.exists():
                folder = Path(name)
                self._write(folder)
                if header:
                    (folder / f"{self._precompiled}.gch").symlink_to(header)
                (folder / "top.cpp").write_text(top)
                _compile(folder, library, "-shared", "-s", *options, "top.cpp")
        return library

    def _header(self, name: str, options: tuple[str, ...]) -> Path:
        """Return a precompiled header."""
        header = _kept(self.text(f'#include "{name}"'), ".gch", options)
        with _alone(header), tempfile.TemporaryDirectory() as folder:
            if not header.exists():
                self._write(Path(folder))
                _compile(Path(folder), header, *options, "-x", "c++-header", name)
        os.utime(header)
        return header

    def _write(self, folder: Path) -> None:
        for name, text in self._files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def _kept(text: str, suffix: str, options: tuple[str, ...]) -> Path:
    total = hashlib.sha256("\0".join((_version(), *OPTIONS, *options, text)).encode())
    return cache() / (total.hexdigest()[:32] + suffix)


@functools.cache
def _version() -> str:
    assert COMPILER is not None
    found = subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True)
    return f"{found.stdout}{platform.machine()}"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let other processes wait, which would make the same."""
    with open(path.with_name(f"{path.name[:2]}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(folder: Path, made: Path, *options: str) -> None:
    assert COMPILER is not None
    part = made.with_suffix(f".{os.getpid()}")
    command = (COMPILER, *OPTIONS, *options, "-o", str(part))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    part.replace(made)
