"""Read a cubin, an ELF file of the compiler: its kernel's symbol and code."""

from __future__ import annotations

import struct
from typing import NamedTuple

_HEADER_BYTES = 64
_NO_BITS = 8  # the type of a section without contents in the file
_TEXT = ".text."


class _Table(NamedTuple):
    offset: int
    entry_bytes: int
    entries: int

    @property
    def end(self) -> int:
        return self.offset + self.entry_bytes * self.entries


def _tables(cubin: bytes) -> tuple[_Table, _Table, int]:
    """Return where the segments and the sections are listed, and which section holds the names."""
    if len(cubin) < _HEADER_BYTES or cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no 64-bit ELF file")
    segments, sections = struct.unpack_from("<QQ", cubin, 32)
    sizes = struct.unpack_from("<5H", cubin, 54)
    return _Table(segments, *sizes[:2]), _Table(sections, *sizes[2:4]), sizes[4]


def whole(cubin: bytes) -> bytes:
    """Put back the last byte, a NUL, which CuPy takes for the end of a string and drops."""
    segments, sections, _ = _tables(cubin)
    end = max(segments.end, sections.end)
    return cubin + b"\0" if len(cubin) == end - 1 else cubin


def _text_section(cubin: bytes) -> tuple[str, bytes]:
    """Return symbol and instructions of the one kernel; ValueError if the file is not whole.

    The driver is told no length when it loads a cubin, so it is checked here.
    """
    segments, sections, names = _tables(cubin)
    if max(segments.end, sections.end) > len(cubin) or names >= sections.entries:
        raise ValueError("this ELF file is cut off")
    rows = [
        struct.unpack_from("<IIQQQQ", cubin, offset)
        for offset in range(sections.offset, sections.end, sections.entry_bytes)
    ]
    if any(kind != _NO_BITS and at + size > len(cubin) for _, kind, _, _, at, size in rows):
        raise ValueError("this ELF file is cut off")
    _, _, _, _, names_at, names_size = rows[names]
    found = []
    for name_at, _, _, _, at, size in rows:
        name = cubin[names_at + name_at : names_at + names_size].split(b"\0", 1)[0].decode()
        if name.startswith(_TEXT):
            found.append((name.removeprefix(_TEXT), cubin[at : at + size]))
    if len(found) != 1:
        raise ValueError(f"this cubin holds {len(found)} kernels, not one")
    return found[0]


def symbol(cubin: bytes) -> str:
    """Return the mangled name of a cubin's one kernel; ValueError if the file is damaged."""
    return _text_section(cubin)[0]


def code(cubin: bytes) -> bytes:
    """Return the instructions of a cubin's one kernel; ValueError as `symbol`."""
    return _text_section(cubin)[1]
