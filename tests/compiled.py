"""Head dims whose planned tiles have all been compiled as they are: ``data/compiled.json`` says.

A digest stands for each architecture, kernel and head dims: of the kernel's source, of the tiles,
and of the compiler and its options. Whatever changes one of these changes the digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path

from exhaustive import FAMILIES

from cufa import device
from cufa.compiler import nvrtc, source
from cufa.planner.rules import all_variants
from cufa.specs import ATTENTION_KERNELS
from cufa.specs.variant import Variant

FILE = Path(__file__).parent / "data" / "compiled.json"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

Entry = tuple[str, str, tuple[int, int]]
ENTRIES: list[Entry] = [
    (arch, kernel, head_dims)
    for arch in ARCHS
    for kernel in ATTENTION_KERNELS
    if ATTENTION_KERNELS[kernel].runs_on(device.of_arch(arch))
    for head_dims in ATTENTION_KERNELS[kernel].head_dims(device.of_arch(arch))
]


def tokens(text: str) -> str:
    """Return source text without comments and spaces, which change no kernel."""
    return "".join(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).split())


@cache
def variants_of(arch: str, kernel: str, head_dims: tuple[int, int]) -> list[Variant]:
    """Return all variants that a plan can choose."""
    return [
        v
        for v in all_variants(device.of_arch(arch))
        if v.kernel == kernel and (v.head_dim, v.head_dim_v) == head_dims
    ]


@cache
def _of_kernel(kernel: str) -> str:
    parts = tokens(source.text(kernel)), *nvrtc.common_options(), str(nvrtc.version())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def digest(arch: str, kernel: str, head_dims: tuple[int, int]) -> str:
    """Return the digest of all variants as they are now."""
    names = sorted(map(str, variants_of(arch, kernel, head_dims)))
    return hashlib.sha256("\0".join((_of_kernel(kernel), *names)).encode()).hexdigest()[:12]


@cache
def _known() -> dict[str, str]:
    found: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def _name(arch: str, kernel: str, head_dims: tuple[int, int]) -> str:
    return f"{arch} {kernel} {head_dims[0]}-{head_dims[1]}"


def is_known(arch: str, kernel: str, head_dims: tuple[int, int]) -> bool:
    """Return whether all variants have been compiled as they are."""
    entry = arch, kernel, head_dims
    return _known().get(_name(*entry)) == digest(*entry)


def write(families: list[str]) -> None:
    """Take the variants of families as compiled."""
    kernels = {kernel for family in families for kernel in FAMILIES[family]}
    now = {_name(*entry): digest(*entry) for entry in ENTRIES if entry[1] in kernels}
    all_names = {_name(*entry) for entry in ENTRIES}
    found = {name: old for name, old in _known().items() if name in all_names} | now
    FILE.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
