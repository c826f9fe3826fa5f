"""Memory of the host, for arrays of a played GPU, beyond which nothing can be read or written."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections import deque

import numpy as np
from played_gpu import at

_starts: list[int] = []  # in order
_memories: list[np.ndarray] = []  # there
#: Guards of the newest memories. A process has room for 65530 mappings: the oldest memories, of
#: tests that are over, lose their guards.
_guards: deque[tuple[int, int]] = deque()
_MOST_GUARDED = 4000


def new_memory(nbytes: int) -> np.ndarray:
    """Return memory of NaN, a multiple of 16 bytes, between pages that nobody can access.

    It begins at a multiple of 512 bytes if it is large, so that its end is near the end of a page.
    """
    size = max(16, -(-nbytes // 16) * 16)
    page = mmap.PAGESIZE
    pages = -(-size // page) * page
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, pages + 2 * page, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    for guard in (start, start + page + pages):
        assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    _guards.append((start, start + page + pages))
    if len(_guards) > _MOST_GUARDED:
        for guard in _guards.popleft():
            libc.munmap(ctypes.c_void_p(guard), ctypes.c_size_t(page))
    first = start + page + pages - size
    memory = at(first, (size,), (1,), np.dtype(np.uint8))
    memory[...] = 0xFF
    i = bisect.bisect(_starts, first)
    _starts.insert(i, first)
    _memories.insert(i, memory)
    return memory[:nbytes]


def memory_around(address: int) -> np.ndarray | None:
    """Return all of the memory that an address is in; None if it is in none of this kind."""
    i = bisect.bisect(_starts, address) - 1
    if i < 0 or address >= _starts[i] + _memories[i].size:
        return None
    return _memories[i]
