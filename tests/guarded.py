"""Memory of the host, for arrays of a played GPU, beyond which nothing can be read or written."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref

import numpy as np

#: Memories that are in use, by the address of their first byte. Each takes three of the 65,530
#: mappings that a process has room for.
_memories: dict[int, weakref.ref[np.ndarray]] = {}
_starts: list[int] = []  # their keys, in order


def new_memory(nbytes: int) -> np.ndarray:
    """Return memory of NaN, a multiple of 16 bytes, between pages that nobody can access.

    It begins at a multiple of 512 bytes if it is large, so that its end is near the end of a page.
    """
    size = max(16, -(-nbytes // 16) * 16)
    page = mmap.PAGESIZE
    pages = -(-size // page) * page
    mapping = mmap.mmap(-1, pages + 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Its views keep this array, and with it the mapping.
    memory = np.frombuffer(mapping, np.uint8, size, offset=page + pages - size)
    first = memory.ctypes.data
    start = first - (page + pages - size)
    for guard in (start, start + page + pages):
        forbid = ctypes.CDLL(None).mprotect
        assert forbid(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    memory[...] = 0xFF
    bisect.insort(_starts, first)
    _memories[first] = weakref.ref(memory, lambda _: _forget(first))
    return memory[:nbytes]


def _forget(first: int) -> None:
    del _memories[first]
    del _starts[bisect.bisect_left(_starts, first)]


def memory_around(address: int) -> np.ndarray | None:
    """Return all of the memory that an address is in; None if it is in none of this kind."""
    i = bisect.bisect(_starts, address) - 1
    found = _memories[_starts[i]]() if i >= 0 else None
    if found is None or address >= _starts[i] + found.size:
        return None
    return found
