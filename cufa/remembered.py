"""Memories of what was computed, of a bounded size, which threads share."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

_T = TypeVar("_T")

_lock = threading.Lock()


def remember(memory: dict[Any, _T], key: Any, value: _T, limit: int) -> _T:
    """Put a value into a memory, unless it has one; return the one that it keeps.

    A full memory loses its oldest.
    """
    lost = []  # deleted after the lock is released, which `__del__` may need
    with _lock:
        kept = memory.setdefault(key, value)
        while len(memory) > limit:
            oldest = next(iter(memory))
            lost.append((oldest, memory.pop(oldest)))
    return kept
