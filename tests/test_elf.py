"""elf.py: the kernel inside a compiled file, and files that are not whole."""

from __future__ import annotations

import struct

import pytest

from cufa.compiler import elf, nvrtc
from cufa.specs.variant import Variant

SMALL = Variant("fa2_mma", "float16", 32, 32, 64, 16, 1, 4, 1)


@pytest.fixture(scope="module", params=["sm_80", "sm_90a", "sm_120"])
def compiled(request: pytest.FixtureRequest) -> bytes:
    return nvrtc.compile_variant(SMALL, request.param).cubin


def test_symbol(compiled: bytes) -> None:
    """Names of C++: the name's length, the name and the template arguments."""
    symbol = elf.symbol(compiled)
    assert symbol.startswith("_Z7fa2_mmaI7float16Li32ELi32ELi64ELi16E")
    assert f".text.{symbol}".encode() in compiled


def test_code(compiled: bytes) -> None:
    """Instructions of 16 bytes, the last of which are a jump to itself (BRA) and nothing (NOP)."""
    code = elf.code(compiled)
    assert 1000 < len(code) < len(compiled)
    assert len(code) % 16 == 0
    assert code in compiled
    kinds = [code[at] | code[at + 1] % 16 << 8 for at in range(0, len(code), 16)]
    while kinds[-1] == 0x918:
        kinds.pop()
    assert kinds[-1] == 0x947


def test_whole(compiled: bytes) -> None:
    assert elf.whole(compiled) == compiled
    assert elf.whole(compiled[:-1]) == compiled[:-1] + b"\0"


def test_what_is_cut_off_is_refused(compiled: bytes) -> None:
    for length in (*range(0, len(compiled), 997), len(compiled) - 1):
        with pytest.raises(ValueError, match=r"cut off|no 64-bit ELF file"):
            elf.symbol(compiled[:length])


def test_sections_beyond_the_end_are_refused(compiled: bytes) -> None:
    damaged = bytearray(compiled)
    (sections,) = struct.unpack_from("<Q", compiled, 40)
    struct.pack_into("<Q", damaged, sections + 64 + 32, 1 << 40)  # the first section's size
    with pytest.raises(ValueError, match="cut off"):
        elf.code(bytes(damaged))


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(1000), b"\x7fELF\x01" + bytes(99)])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        elf.symbol(data)


def test_a_file_without_a_kernel_is_refused() -> None:
    """One section, which holds its own name."""
    header = struct.pack("<6s26xQQ6xHHHHH", b"\x7fELF\x02\x01", 0, 64, 0, 0, 64, 1, 0)
    section = struct.pack("<IIQQQQ24x", 0, 3, 0, 0, 128, 10)
    with pytest.raises(ValueError, match="holds 0 kernels"):
        elf.symbol(header + section + b".shstrtab\0")
