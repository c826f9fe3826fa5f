#!/usr/bin/env python3
"""Measure cufa beside its peers, and make tables and plots from the results.

    python scripts/bench.py prefill --kernel fa2_mma
    python scripts/bench.py fp32
    python scripts/bench.py host
    python scripts/bench.py jit
    python scripts/bench.py explore
    python scripts/bench.py tune
    python scripts/bench.py report

All but the last need a CUDA GPU and write ``docs/benchmarks/<gpu>-<bench>.json``; the last makes a
Markdown page and a PNG plot beside each such file and needs matplotlib. The method is described
in ``docs/benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks"

# What is measured is this checkout, whether or not a cufa is installed.
sys.path.insert(0, str(ROOT))

from benchmarks.cells import SEQS, Cell, standard_cells  # noqa: E402

PREFILL_HEAD_DIMS = {"bfloat16": (64, 128, 256), "float16": (128,)}
PREFILL_PEERS = (
    "fa2",
    "cudnn",
    "efficient",
    "flash_attn_2",
    "flash_attn_3",
    "flash_attn_4",
    "flashinfer",
    "cupy",
)
FP32_HEAD_DIMS = (64, 128)
FP32_PEERS = ("efficient", "math", "cupy", "cufa_fa1")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        description="Measure cufa beside its peers, and make tables and plots from the results."
    )
    commands = top.add_subparsers(dest="bench", required=True)
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--out", type=Path, help="result file (default: docs/benchmarks/<gpu>-...)")
    run.add_argument("--commit", help="commit to record where git cannot tell")
    table = argparse.ArgumentParser(add_help=False)
    table.add_argument("--head-dim", type=int, nargs="+", help="head dims of the table")
    table.add_argument("--seq", type=int, nargs="+", default=SEQS, help="sequence lengths")
    table.add_argument("--rounds", type=int, default=13, help="samples of a contestant, at most")
    table.add_argument("--seed", type=int, default=1, help="seed of the random data")

    prefill = commands.add_parser("prefill", parents=[run, table], help="16-bit prefill table")
    prefill.add_argument("--kernel", default="auto", help="kernel forced on cufa (default: auto)")
    prefill.add_argument(
        "--dtype", nargs="+", default=list(PREFILL_HEAD_DIMS), choices=list(PREFILL_HEAD_DIMS)
    )
    prefill.add_argument(
        "--peers",
        nargs="*",
        default=list(PREFILL_PEERS),
        help=f"besides the default, {' '.join(PREFILL_PEERS)}: flex (compiles for long), math",
    )

    fp32 = commands.add_parser("fp32", parents=[run, table], help="float32 table")
    fp32.add_argument("--kernel", default="fa2_fp32", help="kernel forced on cufa")
    fp32.add_argument("--peers", nargs="*", default=list(FP32_PEERS), help="besides cufa")

    host = commands.add_parser("host", parents=[run], help="host cost of one small call")
    host.add_argument("--kernel", default="auto", help="kernel forced on cufa (default: auto)")

    jit = commands.add_parser("jit", parents=[run], help="first call in a new process")
    jit.add_argument(
        "--kernel", nargs="+", default=["auto", "fa2_mma"], help="kernels for bfloat16"
    )

    explore = commands.add_parser("explore", parents=[run], help="the explorer's own time and aim")
    explore.add_argument("--kernel", default="fa2_mma", help="kernel to explore")
    explore.add_argument("--q", default="2,16,8192,128", help="shape of q, k and v")
    explore.add_argument("--dtype", default="bfloat16", choices=list(PREFILL_HEAD_DIMS))
    explore.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)

    tune = commands.add_parser("tune", parents=[run], help="what tuning the standard table gives")
    tune.add_argument("--dtype", default="bfloat16", choices=list(PREFILL_HEAD_DIMS))

    report = commands.add_parser("report", help="pages and plots from result files")
    report.add_argument("files", type=Path, nargs="*", help="default: all of docs/benchmarks")
    return top


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells of a prefill or fp32 run.

    Raises
    ------
    ValueError
        When a head dim or a length does not divide the standard table's sizes.
    """
    if options.bench == "fp32":
        return standard_cells("float32", options.head_dim or FP32_HEAD_DIMS, options.seq)
    cells = []
    for dtype in options.dtype:
        head_dims = options.head_dim or PREFILL_HEAD_DIMS[dtype]
        cells += standard_cells(dtype, head_dims, options.seq)
    return cells


def forced(kernel: str) -> str | None:
    """Return a kernel's name as `cufa.attention` takes it: None for ``auto``."""
    return None if kernel == "auto" else kernel


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a benchmark, writing the result file anew after every row.

    Returns
    -------
    int
        The exit status: 1 when cufa could not run a cell, or no row came out.
    """
    # CuPy reads this before its first product; float32 means float32 here.
    os.environ["CUPY_TF32"] = "0"
    from benchmarks import environment, results

    from cufa.explorer import ceilings
    from cufa.explorer.timing import CudaClock

    started = time.perf_counter()
    kernel = None if options.bench in ("jit", "tune") else forced(options.kernel)
    path = options.out or results.default_path(
        RESULTS, environment.device_name(), options.bench, kernel
    )
    measured = ceilings.measure(CudaClock(), "bfloat16")
    if "gemm_tflops" not in measured:
        raise RuntimeError("no matrix product: cuBLAS is not installed, or memory is short")
    measured["gemm_bf16_tflops"] = measured.pop("gemm_tflops")
    print(f"ceilings: {measured}", flush=True)
    rows: list[dict[str, Any]] = []
    head: dict[str, Any] = {}
    source, table = _rows(options, kernel)
    for row in source:
        # Described after the first row, when the peers that are here have been imported.
        head = head or environment.describe(options.bench, list(arguments), options.commit)
        rows.append(row)
        results.write(path, {**head, "ceilings": measured, "rows": rows})
    print(f"{len(rows)} rows in {time.perf_counter() - started:.0f} s, {path}", flush=True)
    return 0 if rows and not (table and table.failed) else 1


def _rows(options: argparse.Namespace, kernel: str | None) -> tuple[Iterable[dict[str, Any]], Any]:
    """Return the rows of a benchmark as they come, and the table that counts failed cells."""
    if options.bench == "host":
        from benchmarks import host

        return host.rows(kernel), None
    if options.bench == "jit":
        from benchmarks import jit

        return jit.rows(options.kernel), None
    if options.bench == "explore":
        from benchmarks import explore

        return explore.rows(options.kernel, options.q, options.dtype, options.causal), None
    if options.bench == "tune":
        from benchmarks import tune

        return tune.rows(options.dtype), None
    from benchmarks.prefill import Table

    from cufa.explorer.timing import Budget

    budget = Budget(rounds=options.rounds)
    table = Table(kernel=kernel, peers=options.peers, budget=budget, seed=options.seed)
    return table.rows(cells_of(options)), table


def report(files: Sequence[Path]) -> int:
    """Write the page and the plot of each result file, and return the exit status."""
    from benchmarks.report import write_report

    for path in files or sorted(RESULTS.glob("*.json")):
        page, plot = write_report(path)
        print(f"{page}, {plot}")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    top = parser()
    options = top.parse_args(arguments)
    try:
        if options.bench == "report":
            return report(options.files)
        if options.bench in ("prefill", "fp32"):
            cells_of(options)
            from benchmarks.peers import check_names

            check_names(options.peers)
            if options.rounds < 1:
                raise ValueError("--rounds must be at least 1")
    except (ValueError, OSError) as error:
        top.error(str(error))
    return measure(options, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
