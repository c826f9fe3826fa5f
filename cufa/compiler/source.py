"""The CUDA source of the kernels: one self-contained text a kernel, and a digest of it all."""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources

from cufa.features.parts import PARTS, part_named
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


@functools.cache
def text(kernel: str) -> str:
    """Return the text of a kernel with its headers put in place.

    One self-contained text makes CuPy's disk cache right by itself: its key holds the source and
    not what an ``#include`` reaches. ``#line`` keeps messages pointing at the real files.
    """
    return _bundled(kernel)


def of(variant: Variant | Instance) -> str:
    """Return the text of a variant's kernel, with those parts of its score that are a caller's own.

    They come last: the kernels are templates, which find them when they are instantiated.
    """
    parts = user_parts(variant)
    return _bundled(variant.kernel, parts) if parts else text(variant.kernel)


def user_parts(variant: Variant | Instance) -> str:
    """Return the source of those parts of a variant's score that are a caller's own."""
    return "".join(part_named(name).source for name in variant.score if name not in PARTS)


def _bundled(kernel: str, parts: str = "") -> str:
    folder = resources.files("cufa.kernels")
    done: set[str] = set()

    def expand(name: str, more: str = "") -> str:
        content = (folder / name).read_text(encoding="utf-8") + more

        def include(match: re.Match[str]) -> str:
            header = match[1]
            if header in done:
                return ""
            done.add(header)
            line = content.count("\n", 0, match.start()) + 2
            return f'#line 1 "{header}"\n{expand(header)}\n#line {line} "{name}"'

        return _INCLUDE.sub(include, content).replace("#pragma once\n", "\n")

    return f'#line 1 "{kernel}.cu"\n{expand(f"{kernel}.cu", parts)}'


@functools.cache
def digest() -> str:
    """Return 16 hex digits that change when any kernel or header does."""
    files = {
        file.name: file.read_bytes()
        for file in resources.files("cufa.kernels").iterdir()
        if file.name.endswith((".cu", ".cuh"))
    }
    total = hashlib.sha256()
    for name, content in sorted(files.items()):
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()[:16]
