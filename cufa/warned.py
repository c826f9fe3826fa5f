"""Warnings of what is slower, or left out, but no error."""

from __future__ import annotations

import warnings


def warn(message: str) -> None:
    """Warn at the place that called the caller of this function."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)
