"""What ``python -m cufa tune --standard`` gives: each cell with and without the table."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.cells import cell_of
from benchmarks.contestants import rounded
from cufa import device as devices
from cufa import tuned
from cufa.compiler.nvrtc import compile_variant
from cufa.device import Device
from cufa.explorer.stage import duel_of, free_memory
from cufa.explorer.standard import standard_problems
from cufa.planner.plan import plan
from cufa.problem import Problem
from cufa.variant import Variant


def rows(dtype: str) -> Iterator[dict[str, Any]]:
    """Yield a row a cell, and print a line for each.

    The command runs in a new process with empty caches; its table stays where CUFA_CACHE_DIR is set
    to a folder. Then, cell by cell, the planner's choice without the table it wrote and with it are
    timed against each other. Where both are the same variant there is one figure, and it stands in
    both columns.
    """
    device = devices.current()
    problems = standard_problems((dtype,))
    before = {problem: plan(problem, device).variant for problem in problems}
    with tempfile.TemporaryDirectory() as folder:
        child = environment.of_child(folder)
        child["CUFA_CACHE_DIR"] = os.environ.get("CUFA_CACHE_DIR", child["CUFA_CACHE_DIR"])
        command = [sys.executable, "-m", "cufa", "tune", "--standard", "--dtype", dtype]
        subprocess.run(command, env=child, check=True)
        table = tuned.load(tuned.user_path(device, Path(child["CUFA_CACHE_DIR"])))
    after = {problem: plan(problem, device, table=table).variant for problem in problems}
    for problem in problems:
        row = _row(problem, before[problem], after[problem], device)
        print(f"{cell_of(problem)}: {row['cufa']} TFLOP/s, before {row['peers']['untuned']}")
        yield row


def _row(problem: Problem, before: Variant, after: Variant, device: Device) -> dict[str, Any]:
    cell = cell_of(problem)
    first, second = ((v, compile_variant(v, device.arch).cubin) for v in (before, after))
    found = duel_of(problem, device, first, second)
    free_memory()
    untuned = rounded(cell.tflops(found.first_ms), 5)
    same = before == after
    return {
        **cell.row(),
        "kernel": str(after),
        "unit": "TFLOP/s",
        "cufa": untuned if same else rounded(untuned * found.ratio, 5),
        "peers": {"untuned": untuned},
    }
