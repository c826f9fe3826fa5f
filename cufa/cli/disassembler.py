"""Cubin -> SASS, where NVIDIA's disassembler is found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from cufa.cli.parser import CommandError

_TOOL = "nvdisasm"


def _packages() -> list[Path]:
    """Return the folders of programs in the pip packages of CUDA, the newest CUDA first."""
    shared = importlib.util.find_spec("nvidia")  # a namespace of all of them
    places = shared.submodule_search_locations if shared else None
    return [folder for place in places or () for folder in sorted(Path(place).glob("*/bin"))[::-1]]


def find() -> str:
    """Return the path of nvdisasm: on PATH, in a CUDA toolkit, or of the pip package.

    cuobjdump needs it too, so there is no use in looking for that.
    """
    homes = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    folders = os.pathsep.join([*(f"{home}/bin" for home in homes), *map(str, _packages())])
    program = shutil.which(_TOOL) or shutil.which(_TOOL, path=folders)
    if program is None:
        raise CommandError(f"{_TOOL} is needed for SASS: pip install nvidia-cuda-nvdisasm")
    return program


def sass(tool: str, cubin: bytes) -> str:
    """Return the machine code of a cubin as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool}: {done.stderr or done.stdout}")
    return done.stdout
