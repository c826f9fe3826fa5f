"""Which families of kernels have changed since all their tests ran: ``data/verified.json`` says.

``python tests/verified.py`` prints their names, with commas between. With ``write`` behind it,
they are taken as verified; with names behind that, only these.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import date
from pathlib import Path

import compiled
from compiled import tokens
from emulated import FOLDERS, SHARED
from exhaustive import FAMILIES
from shared_libraries import Sources

from cufa.compiler import source

FILE = Path(__file__).parent / "data" / "verified.json"


def digest(family: str, sources: Sources) -> str:
    """Return a digest of all that a family's kernels are made of, for GPUs and for the emulator."""
    total = hashlib.sha256()
    for kernel in FAMILIES[family]:
        emulated = sources.text(f'{SHARED}\n#include "{kernel}.cu"')
        total.update(f"{tokens(source.text(kernel))}\0{tokens(emulated)}\0".encode())
    return total.hexdigest()[:16]


def digests() -> dict[str, str]:
    """Return the digest of each family as it is now."""
    sources = Sources(*FOLDERS)
    return {family: digest(family, sources) for family in FAMILIES}


def read() -> dict[str, dict[str, str]]:
    """Return what is known of each family that was verified."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def changed() -> list[str]:
    """Return the families that are not as they were verified."""
    known = read()
    return [name for name, now in digests().items() if known.get(name, {}).get("digest") != now]


def write(families: list[str]) -> None:
    """Take families as verified."""
    from cupy.cuda import nvrtc

    now, version = digests(), ".".join(map(str, nvrtc.getVersion()))
    known = read()
    for name in families:
        known[name] = {"digest": now[name], "nvrtc": version, "date": date.today().isoformat()}
    FILE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    compiled.write(families)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(sys.argv[2].split(",") if sys.argv[2:] else changed())
    else:
        print(",".join(changed()))
