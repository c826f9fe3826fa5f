"""Arguments that `cufa.explore` and tuning share, checked before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from cufa.explorer.run import Progress


def checked_kernels(kernels: Iterable[str] | None) -> list[str] | None:
    """Return the names of kernels as a list, or None as it is.

    Raises
    ------
    TypeError
        `kernels` is no iterable of strings, or a single string.
    ValueError
        It is empty.
    """
    if kernels is None:
        return None
    if isinstance(kernels, str) or not isinstance(kernels, Iterable):
        raise TypeError(f"kernels must be a sequence of names, not {kernels!r}")
    names = list(kernels)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"kernels must be a sequence of names, not {names!r}")
    if not names:
        raise ValueError("kernels has no name")
    return names


def check(jobs: int | None, progress: Callable[[Progress], None] | None) -> None:
    """Check what says how variants are compiled, and who is told.

    Raises
    ------
    TypeError, ValueError
    """
    if jobs is not None:
        if isinstance(jobs, bool) or not isinstance(jobs, (int, np.integer)):
            raise TypeError(f"jobs must be an integer or None, not {type(jobs).__name__}")
        if jobs < 1:
            raise ValueError(f"jobs must be at least 1, not {jobs}")
    if not (progress is None or callable(progress)):
        raise TypeError(f"progress must be callable or None, not {type(progress).__name__}")
