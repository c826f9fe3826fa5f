"""What this machine has: CuPy, NVRTC and a GPU; a `CommandError` says what is missing."""

from __future__ import annotations

import argparse
from typing import Any

from cufa import device as devices
from cufa.cli.parser import CommandError
from cufa.device import Device

INSTALL_CUPY = "pip install 'cufa[cuda13]' (or cuda12) brings it"
# What CuPy and its loader of CUDA's libraries raise where one is not there, or is too old.
MISSING = (ImportError, OSError, RuntimeError)


def cupy() -> Any:
    """Return the CuPy module."""
    try:
        import cupy
    except ImportError as error:
        raise CommandError(f"CuPy is missing ({error}): {INSTALL_CUPY}") from error
    return cupy


def check_compiler() -> None:
    """Make sure that kernels can be compiled."""
    cupy()
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except MISSING as error:
        raise CommandError(f"NVRTC is missing ({error}): {INSTALL_CUPY}") from error


def current_gpu(remedy: str) -> Device:
    """Return the current GPU; `remedy` says what to do without one."""
    module = cupy()
    try:
        return devices.of_id(module.cuda.runtime.getDevice())
    except module.cuda.runtime.CUDARuntimeError as error:
        raise CommandError(f"no GPU here ({error}): {remedy}") from error


def chosen_gpu(options: argparse.Namespace) -> Device:
    """Return the GPU that --gpu or --arch names, or else the current one."""
    named: Device | None = options.gpu or options.arch
    return named or current_gpu("name one, such as --gpu h100 or --arch sm_86")
