"""``info``: the GPU, the libraries, the caches and the kernels of this machine.

Print what cufa finds on this machine: the GPU and its driver, the versions of
the libraries, the cache folders and their sizes, the tuned tables, and which
kernel each element type gets. Works without a GPU and without CuPy.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from cufa import __version__, disk_cache, tuned
from cufa import device as devices
from cufa.cli import machine, table
from cufa.cli.parser import CommandError, Parser
from cufa.compiler import source
from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.planner.attention import Planner
from cufa.problem.problem import Problem

_TYPICAL = (4, 32, 4096, 128)


def add(parser: Parser) -> None:
    """Add no options."""


def run(options: argparse.Namespace) -> int:
    """Print all that is found."""
    device, about = _device()
    cupys = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    rows = [
        ("cufa", f"{__version__}, kernel sources {source.digest()}"),
        ("Python", f"{platform.python_version()}, NumPy {np.__version__}"),
        ("CuPy", _if_there(lambda: machine.cupy().__version__)),
        ("NVRTC", _if_there(lambda: ".".join(map(str, machine.check_compiler())))),
        ("driver", _driver()),
        ("GPU", about),
        ("cufa's cache", _if_there(_own_cache)),
        ("CuPy's cache", _folder_text(Path(cupys))),
    ]
    if device is None:
        rows.append(("kernels", "none: NumPy arrays are computed on the CPU"))
    else:
        rows += [("tuned table", _if_there(lambda: _tuned_table(device))), *_kernels(device)]
    table.pairs(rows)
    return 0


def _if_there(read: Callable[[], str]) -> str:
    """Return what a function reads, or why it is missing."""
    try:
        return read()
    except CommandError as failure:
        return str(failure)
    except OSError as error:
        return f"none: {error}"


def _driver() -> str:
    """Return the driver's version, and the CUDA version that it offers where CuPy can say."""
    words = [machine.driver_version()]
    with suppress(CommandError, *machine.MISSING):
        if offered := machine.cupy().cuda.runtime.driverGetVersion():
            words.append(f"for CUDA up to {machine.dotted(offered)}")
    return ", ".join(filter(None, words)) or "none"


def _device() -> tuple[Device | None, str]:
    """Return the current GPU, or None, and a line about it."""
    try:
        runtime: Any = machine.cupy().cuda.runtime
        number, count = runtime.getDevice(), runtime.getDeviceCount()
        device = devices.of_id(number)
    except CommandError:
        return None, "unknown without CuPy"
    except machine.MISSING as error:
        return None, f"none ({error})"
    return device, (
        f"{device.name}, {device.arch}, {device.sm_count} multiprocessors, "
        f"{device.smem_per_block // 1024} KiB of shared memory a block "
        f"(device {number}, {count} in all)"
    )


def _own_cache() -> str:
    folder = disk_cache.folder()
    found = (disk_cache.why_ignored(folder / name) for name in (".", "kernels", "tuned"))
    return "; ".join((_folder_text(folder), *dict.fromkeys(filter(None, found))))


def _folder_text(folder: Path) -> str:
    if os.path.exists(folder) and not os.path.isdir(folder):
        return f"{folder}, which is no folder"
    return f"{folder}, {table.size_text(disk_cache.size_bytes(folder))}"


def _tuned_table(device: Device) -> str:
    """Return the tuned table that plans for a GPU follow."""
    found = tuned.user_table(device)
    if found is not None:
        return f"user's table: {len(found.entries)} classes of problems, {found.date}"
    return f"none: 'python -m cufa tune' writes {tuned.user_path(device)}"


def _kernels(device: Device) -> list[tuple[str, str]]:
    """Return the kernel of each element type, for a typical problem."""
    rows = [("kernels", f"for {','.join(map(str, _TYPICAL))}, say")]
    for dtype in DTYPES:
        problem = Problem.of_shapes(*[_TYPICAL] * 3, dtype=dtype)
        try:
            found = Planner(problem, device, table=tuned.user_table(device))(problem)
        except ValueError as error:
            return [("kernels", f"none: {error}")]
        rows.append((f"  {dtype}", f"{found.variant.kernel}: {found.variant} ({found.reason})"))
    return rows
