"""CuPy, NVRTC and a GPU of this machine; a `CommandError` says what is missing."""

from __future__ import annotations

import argparse
import os
import subprocess
from typing import Any

from cufa import device as devices
from cufa import disk_cache, optional
from cufa.cli.parser import CommandError
from cufa.compiler import nvrtc
from cufa.device import Device

# Errors of CuPy and its loader of CUDA's libraries where one is not there, or is too old.
MISSING = (ImportError, OSError, RuntimeError)


def cupy() -> Any:
    """Return the CuPy module."""
    try:
        return optional.cupy()
    except ImportError as error:
        raise CommandError(error) from error
    except OSError as error:  # it makes its cache folder
        raise CommandError(f"CuPy does not start ({error}): set CUPY_CACHE_DIR") from error


def check_compiler() -> tuple[int, int]:
    """Return the version of NVRTC, with which kernels can be compiled."""
    cupy()
    try:
        return nvrtc.version()
    except MISSING as error:
        reason = str(error).partition(":")[0]  # what follows is the places that were looked at
        raise CommandError(f"NVRTC is missing ({reason}): {optional.INSTALL_CUPY}") from error


def current_gpu(remedy: str) -> Device:
    """Return the current GPU; `remedy` says what to do without one."""
    try:
        runtime = cupy().cuda.runtime
    except CommandError as failure:
        raise CommandError(f"no GPU: {failure}; or {remedy}") from failure
    try:
        return devices.current()
    except runtime.CUDARuntimeError as error:
        raise CommandError(f"no GPU here ({error}): {remedy}") from error


def driver_version() -> str:
    """Return the version of the GPU's driver; empty where nvidia-smi does not say it."""
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def dotted(cuda_version: int) -> str:
    """Return a CUDA version as people write it: 13.0 for 13000."""
    return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"


def chosen_gpu(
    options: argparse.Namespace, remedy: str = "name one, such as --gpu h100 or --arch sm_86"
) -> Device:
    """Return the GPU that --gpu or --arch names, or else the current one."""
    named: Device | None = options.gpu or options.arch
    return named or current_gpu(remedy)


def check_cache(name: str) -> None:
    """Make sure that files in a folder of the cache can be written, and will be read.

    Before the work for them.
    """
    try:
        folder = disk_cache.folder() / name
        complaint = disk_cache.why_ignored(folder.parent) or disk_cache.why_ignored(folder)
        if complaint is not None:
            raise CommandError(f"what goes to the cache folder would not be used: {complaint}")
        disk_cache.make_folder(folder)
    except OSError as error:
        raise CommandError(f"the cache folder cannot be written: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CommandError(f"the cache folder cannot be written: {folder}")
