"""Where and how a benchmark ran: device, driver, versions, commit, command."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from cufa import device as devices
from cufa.cli import machine
from cufa.compiler import nvrtc

ROOT = Path(__file__).resolve().parents[2]

_PACKAGES = (
    *("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python"),
    "transformers",
)
"""Packages whose versions are recorded where they are installed."""


def describe(bench: str, arguments: list[str], commit: str | None) -> dict[str, Any]:
    """Return the head of a result object, all but its ceilings and rows.

    `commit` is for a caller who knows it better than git does here.
    """
    return {
        "bench": bench,
        "command": command_line(arguments),
        "commit": commit or git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **(_cpu() if bench == "cpu" else _gpu()),
    }


def _gpu() -> dict[str, Any]:
    return {"device": device_name(), "driver": driver_version(), "versions": versions()}


def _cpu() -> dict[str, Any]:
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    found = {"python": platform.python_version(), "numpy": np.__version__}
    found[blas["name"]] = blas["version"]
    if sys.modules.get("torch") is not None:
        found["torch"] = str(sys.modules["torch"].__version__)
    return {"device": cpu_name(), "driver": "", "versions": found}


def cpu_name() -> str:
    """Return the name of the processor."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        told = ""
    found = re.search(r"^model name\s*: (.+)$", told, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def command_line(arguments: list[str]) -> str:
    """Return the command to run again: without ``--commit``, and with ``--out`` in its place."""
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--commit":
            if not equals:
                next(rest, None)
        elif option == "--out":
            name = PurePath(value if equals else next(rest, "")).name
            kept += ["--out", f"docs/benchmarks/{name}"]
        elif option == "--before":
            which = value if equals else next(rest, "")
            kept += ["--before", PurePath(which).name if os.path.isabs(which) else which]
        else:
            kept.append(word)
    return shlex.join(["python", "scripts/bench.py", *kept])


def git_commit() -> str:
    """Return the checked-out commit, ``-dirty`` behind it if files differ; or ``unknown``."""
    try:
        head = _output("git", "rev-parse", "HEAD")
        changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def of_child(caches: str) -> dict[str, str]:
    """Return the environment of a process that runs this checkout with its caches in a folder."""
    path = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "CUFA_CACHE_DIR": os.path.join(caches, "cufa"),
        "CUPY_CACHE_DIR": os.path.join(caches, "cupy"),
        "CUDA_CACHE_PATH": os.path.join(caches, "driver"),
    }


def device_name() -> str:
    """Return the name of the current GPU."""
    return devices.current().name


def driver_version() -> str:
    """Return the version of the driver, or the CUDA version that it offers."""
    import cupy

    offered = machine.dotted(cupy.cuda.runtime.driverGetVersion())
    return machine.driver_version() or f"CUDA {offered}"


def versions() -> dict[str, str]:
    """Return the versions of what was measured and of what it rests on."""
    import cupy

    found = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": cupy.__version__,
        "cuda_runtime": machine.dotted(cupy.cuda.runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, nvrtc.version())),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["torch"] = str(torch.__version__)
        if torch.backends.cudnn.is_available():
            found["cudnn"] = str(torch.backends.cudnn.version())
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(*command: str) -> str:
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30
    ).stdout.strip()
