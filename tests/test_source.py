"""source.py: the bundled text of each kernel, and the digest of all of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import cufa
from cufa.compiler import source
from cufa.features.expression.tracing import trace
from cufa.specs import AUXILIARY_KERNELS, BACKWARD_KERNELS, FP8_KERNELS, KERNELS
from cufa.specs.variant import Variant

SOURCES = Path(cufa.__file__).parent / "kernels"

ALL = (*sorted(KERNELS), *BACKWARD_KERNELS, *FP8_KERNELS, *AUXILIARY_KERNELS)

kernels = pytest.mark.parametrize("kernel", ALL)

#: Beginnings of lines that the bundle has no use for.
REPLACED = ("#include", "#pragma once")


@kernels
def test_every_line_is_where_line_directives_say(kernel: str) -> None:
    files: dict[str, list[str]] = {}
    name, number, seen = "", 0, set()
    for line in source.text(kernel).splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if directive:
            number, name = int(directive[1]), directive[2]
            continue
        if name not in files:
            files[name] = (SOURCES / name).read_text().splitlines()
        if number > len(files[name]):  # the end of the last line, before the next directive
            assert line == ""
            continue
        original = files[name][number - 1]
        if original.startswith(REPLACED):
            assert line == ""
        else:
            assert line == original
            seen.add((name, number))
        number += 1
    assert f"{kernel}.cu" in files
    for name, lines in files.items():
        expected = {i for i, line in enumerate(lines, 1) if not line.startswith(REPLACED)}
        assert {number for file, number in seen if file == name} == expected, name


@kernels
def test_every_include_is_replaced_once(kernel: str) -> None:
    text = source.text(kernel)
    assert "#include" not in text
    assert "#pragma once" not in text
    starts = re.findall(r'^#line 1 "(.+)"$', text, re.MULTILINE)
    assert len(set(starts)) == len(starts)
    assert starts[0] == f"{kernel}.cu"
    files = [(SOURCES / name).read_text() for name in starts]
    included = {h for file in files for h in re.findall(r'^#include "(.+)"$', file, re.MULTILINE)}
    assert set(starts[1:]) == included


def test_every_file_is_used() -> None:
    sources = {path.stem for path in SOURCES.glob("*.cu")}
    assert sources == set(ALL)
    table = np.ones(3, np.float32)
    own = trace(lambda s, b, h, i, j: s + table[j], None, ("table",)).parts
    variant = Variant("fa2_mma", "float16", 64, 64, 64, 64, 2, 4, 1, score=own)
    bundled = "\n".join((*map(source.text, sources), source.of(variant)))
    for header in SOURCES.glob("*.cuh"):
        assert f'#line 1 "{header.name}"' in bundled, f"{header.name} is included by no kernel"


@kernels
def test_one_kernel_a_file(kernel: str) -> None:
    assert source.text(kernel).count("__global__") == 1
    assert re.search(rf"__global__ [^;{{]*\b{kernel}\(", source.text(kernel))


@kernels
def test_an_edited_header_changes_the_text(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's cache on disk goes by the text: an edit anywhere must show there."""
    copy = tmp_path / "kernels"
    shutil.copytree(SOURCES, copy)
    monkeypatch.setattr(source.resources, "files", lambda package: copy)
    bundle = source.text.__wrapped__
    before = bundle(kernel)
    assert before == source.text(kernel)
    for name in re.findall(r'^#line 1 "(.+)"$', before, re.MULTILINE):
        original = (copy / name).read_text()
        (copy / name).write_text(original + "// edited\n")
        assert bundle(kernel) != before, name
        (copy / name).write_text(original)
    assert bundle(kernel) == before


def test_unknown_kernel() -> None:
    with pytest.raises(FileNotFoundError):
        source.text("fa9")


def test_digest_is_short_and_the_same_each_time() -> None:
    assert re.fullmatch("[0-9a-f]{16}", source.digest())
    assert source.digest() == source.digest.__wrapped__()


def test_digest_changes_with_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(SOURCES, copy)
    monkeypatch.setattr(source.resources, "files", lambda package: copy)
    digest = source.digest.__wrapped__
    assert digest() == source.digest()
    found = {digest()}
    for path in (*copy.glob("*.cu"), *copy.glob("*.cuh")):
        original = path.read_bytes()
        path.write_bytes(original + b"\n")
        found.add(digest())
        path.rename(path.with_name(f"x{path.name}"))
        found.add(digest())
        path.with_name(f"x{path.name}").unlink()
        found.add(digest())
        path.write_bytes(original)
    files = [*copy.glob("*.cu"), *copy.glob("*.cuh")]
    assert len(found) == 1 + 3 * len(files)
    (copy / "notes.txt").write_text("not a kernel")
    assert digest() == source.digest()
