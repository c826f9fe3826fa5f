"""``inspect``: registers and occupancy of a variant; its source, PTX or SASS.

Show one variant of a kernel of attention, decoding or gradients, which is written
as 'explain', 'explore' and 'compile' print it: the figures of its compilation, or
its text at one of three stages.

Examples
--------
"fa2_mma<bfloat16, 128, 128, 128, 64, 2, 4, 2, Score<Causal>, Dense>" --arch sm_90a
"fa2_mma<float16, 64, 64, 128, 64, 2, 4, 2, Score<>, Dense>" --arch sm_90a --sass
"decode<float16, 64, 64, 16, 16, 3, 4, 1, false, false, Score<>, Paged>" --arch sm_80
"fp8_wgmma<bfloat16, 128, 128, 192, 128, 4, true, Score<>, Quantized<Dense>>" --arch sm_90a
"bwd_mma<bfloat16, 128, 128, 32, 64, 2, 4, 2, Score<Causal>, Dense>" --arch sm_80
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from cufa.cli import machine, table
from cufa.cli.parser import CommandError, Parser, add_device, add_flag
from cufa.cli.values import variant
from cufa.compiler import nvrtc, source
from cufa.device import Device
from cufa.explorer.occupancy import resident_blocks
from cufa.specs.variant import Variant

_TOOL = "nvdisasm"


def add(parser: Parser) -> None:
    """Add the command's options."""
    parser.add_argument("variant", type=variant, metavar="VARIANT", help="quoted, for its < and >")
    stage = parser.add_mutually_exclusive_group()
    add_flag(stage, "--source", "the CUDA source with its headers and instantiation")
    add_flag(stage, "--ptx", "the PTX")
    add_flag(stage, "--sass", "the machine code; needs nvdisasm")
    add_device(parser, "What it is compiled for: this machine's by default.")


def run(options: argparse.Namespace) -> int:
    """Print what is asked for."""
    if options.source:
        print(instantiated(options.variant))
        return 0
    tool = _disassembler() if options.sass else ""
    machine.check_compiler()
    device = machine.chosen_gpu(options)
    complaint = options.variant.illegal(device)
    if complaint is not None:
        raise CommandError(f"{options.variant} is not legal on {device.name}: {complaint}")
    if options.ptx:
        print(nvrtc.ptx(options.variant, device.arch))
    elif options.sass:
        compiled = nvrtc.compile_variant(options.variant, device.arch)
        print(_sass(tool, compiled.cubin))
    else:
        _print_figures(options.variant, device)
    return 0


def instantiated(variant: Variant) -> str:
    """Return a text that compiles to one variant, by NVRTC or by nvcc, with nothing to include."""
    # The type of the kernel, as kernels differ in their parameters.
    return f"{source.text(variant.kernel)}\ntemplate __global__ decltype({variant}) {variant};"


def _print_figures(variant: Variant, device: Device) -> None:
    compiled = nvrtc.compile_variant(variant, device.arch)
    smem_bytes = compiled.static_smem_bytes + compiled.dynamic_smem_bytes
    blocks = resident_blocks(device, variant.threads, compiled.registers, smem_bytes)
    threads, spills = blocks * variant.threads, compiled.spill_bytes
    table.pairs(
        (
            ("variant", variant),
            ("compiled for", f"{device.arch}, occupancy of {device.name}"),
            ("registers", f"{compiled.registers} a thread"),
            ("spills", f"{spills} bytes a thread" if spills else "none"),
            ("shared memory", f"{smem_bytes} bytes a block ({compiled.static_smem_bytes} static)"),
            ("threads", f"{variant.threads} a block"),
            ("occupancy", f"{blocks} blocks, {threads} of {device.threads_per_sm} threads"),
            ("code", f"{compiled.code_bytes} bytes"),
        )
    )


def _packages() -> list[Path]:
    """Return the folders of programs in the pip packages of CUDA, the newest CUDA first."""
    shared = importlib.util.find_spec("nvidia")  # a namespace of all of them
    places = shared.submodule_search_locations if shared else None
    return [folder for place in places or () for folder in sorted(Path(place).glob("*/bin"))[::-1]]


def _disassembler() -> str:
    """Return the path of nvdisasm: on PATH, in a CUDA toolkit, or of the pip package.

    cuobjdump needs it too, so there is no use in looking for that.
    """
    homes = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    folders = os.pathsep.join([*(f"{home}/bin" for home in homes), *map(str, _packages())])
    program = shutil.which(_TOOL) or shutil.which(_TOOL, path=folders)
    if program is None:
        raise CommandError(f"{_TOOL} is needed for SASS: pip install nvidia-cuda-nvdisasm")
    return program


def _sass(tool: str, cubin: bytes) -> str:
    """Return the machine code of a cubin as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool}: {done.stderr or done.stdout}")
    return done.stdout
