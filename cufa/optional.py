"""Packages that NumPy arrays do not need: CuPy, for a GPU and the compiler, and other extras."""

from __future__ import annotations

from typing import Any


def install(extra: str) -> str:
    """Return the command for an extra of ``pyproject.toml``; no index has cufa, a clone does."""
    return f'pip install ".[{extra}]" in a clone of cufa'


INSTALL_CUPY = 'pip install ".[cuda13]" (or cuda12) in a clone of cufa brings it'


def cupy() -> Any:
    """Return the CuPy module.

    Raises
    ------
    ImportError
        It is missing; the message says how to install it.
    """
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"CuPy is missing ({error}): {INSTALL_CUPY}") from error
    return cupy
