"""Read a cubin, an ELF file of the compiler: its kernel's symbol and code."""

from __future__ import annotations

import struct

_HEADER_BYTES = 64
_NO_BITS = 8  # the type of a section without contents in the file
_TEXT = ".text."


def _sections(cubin: bytes) -> tuple[range, int, int]:
    """Return where each section is described, which one holds the names, and how long a file is.

    Descriptions of segments and of sections come last.
    """
    if len(cubin) < _HEADER_BYTES or cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no 64-bit ELF file")
    segments, sections = struct.unpack_from("<QQ", cubin, 32)
    of_segment, n_segments, of_section, n_sections, names = struct.unpack_from("<5H", cubin, 54)
    end = sections + of_section * n_sections
    return range(sections, end, of_section), names, max(end, segments + of_segment * n_segments)


def whole(cubin: bytes) -> bytes:
    """Put back the last byte, a NUL, which CuPy takes for the end of a string and drops."""
    _, _, length = _sections(cubin)
    return cubin + b"\0" if len(cubin) == length - 1 else cubin


def _text_section(cubin: bytes) -> tuple[str, bytes]:
    """Return symbol and instructions of the one kernel; ValueError if the file is not whole.

    The driver is told no length when it loads a cubin, so it is checked here.
    """
    sections, names, length = _sections(cubin)
    if length > len(cubin) or names >= len(sections):
        raise ValueError("this ELF file is cut off")
    rows = [struct.unpack_from("<IIQQQQ", cubin, place) for place in sections]
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
