"""CuPy, which arrays on a GPU and the compiler need, and NumPy arrays do not."""

from __future__ import annotations

from typing import Any

INSTALL_CUPY = "pip install 'cufa[cuda13]' (or cuda12) brings it"


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
