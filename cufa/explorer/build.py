"""Compile variants in parallel, and read off what the compiler says of them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from cufa.compiler import nvrtc
from cufa.compiler.nvrtc import Compiled, CompileError
from cufa.device import Device
from cufa.explorer.occupancy import resident_blocks
from cufa.explorer.result import Row
from cufa.specs.backward_variant import BackwardVariant
from cufa.specs.instance import Instance
from cufa.specs.variant import Variant


class Built(NamedTuple):
    """The outcome of one Variant or Instance, and the seconds that its compilation took."""

    variant: Any
    compiled: Compiled | CompileError
    seconds: float


def _build(variant: Variant | Instance, arch: str) -> Built:
    started = time.perf_counter()
    it = variant.instance if isinstance(variant, BackwardVariant) else variant
    try:
        compiled: Compiled | CompileError = nvrtc.compile_variant(it, arch)
    except CompileError as error:
        compiled = error
    return Built(variant, compiled, time.perf_counter() - started)


def compile_all(
    variants: Iterable[Variant | Instance], arch: str, jobs: int | None = None
) -> Generator[Built, None, None]:
    """Compile variants for an architecture such as "sm_90a" in threads; yield each as it is done.

    There is a thread a core unless `jobs` says otherwise. Close the generator
    (`contextlib.closing`) to drop what has not begun.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        try:
            for future in as_completed([pool.submit(_build, v, arch) for v in variants]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def static_row(built: Built, device: Device) -> Row:
    """Return the row of a variant that was compiled: the figures that need no GPU."""
    variant, compiled, seconds = built
    if isinstance(compiled, CompileError):
        return Row(variant, error=_complaint(compiled.log), compile_s=seconds)
    smem_bytes = compiled.static_smem_bytes + compiled.dynamic_smem_bytes
    blocks = resident_blocks(device, variant.threads, compiled.registers, smem_bytes)
    error = None
    if not blocks:
        error = (
            f"not even one block of {variant.threads} threads with {compiled.registers} registers "
            f"each and {smem_bytes} bytes of shared memory fits a multiprocessor"
        )
    return Row(
        variant,
        error=error,
        notes=_notes(compiled.log),
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        static_smem_bytes=compiled.static_smem_bytes,
        dynamic_smem_bytes=compiled.dynamic_smem_bytes,
        blocks_per_sm=blocks,
        occupancy=blocks * variant.threads / device.threads_per_sm,
        code_bytes=compiled.code_bytes,
        compile_s=seconds,
    )


def _complaint(log: str) -> str:
    """Return the line of a compiler's log that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), " ".join(lines[:1]) or "no message")


def _notes(log: str) -> tuple[str, ...]:
    """Return ptxas's remarks on how it treated wgmma, each once and without mangled names."""
    remarks = re.findall(r"\((C75\d\d)\) *(.*)", log)
    named = (f"{code} {text}" for code, text in remarks)
    plain = (re.sub(r"\s+in (?:the )?function '[^']*'", "", note).strip() for note in named)
    return tuple(dict.fromkeys(plain))
