#!/usr/bin/env python3
"""Measure cufa beside its peers, and make tables and plots from the results.

    python scripts/bench.py prefill --kernel fa2_mma
    python scripts/bench.py gqa
    python scripts/bench.py headdims
    python scripts/bench.py sustained
    python scripts/bench.py fp32
    python scripts/bench.py host
    python scripts/bench.py jit
    python scripts/bench.py explore
    python scripts/bench.py tune
    python scripts/bench.py refactor --before v0.2
    python scripts/bench.py report

All but the last need a CUDA GPU (but for ``refactor --compile``) and write
``docs/benchmarks/<gpu>-<bench>.json``; the last makes a Markdown page and a PNG plot beside each
such file and needs matplotlib. The method is described in ``docs/benchmarks/README.md``.
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

from benchmarks import before  # noqa: E402
from benchmarks.cells import (  # noqa: E402
    FP32_HEAD_DIMS,
    GQA_SEQS,
    PREFILL_HEAD_DIMS,
    SCORES,
    SEQS,
    TABLES,
    Cell,
    gqa_cells,
    standard_cells,
)

from cufa import device as devices  # noqa: E402
from cufa.cli import machine  # noqa: E402
from cufa.cli.parser import CommandError  # noqa: E402

HALF_DTYPES = ("bfloat16", "float16")
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
FP32_PEERS = ("efficient", "math", "cupy", "cufa_fa1")
CUDNN = ("cudnn",)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        description="Measure cufa beside its peers, and make tables and plots from the results."
    )
    commands = top.add_subparsers(dest="bench", required=True)
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("--out", type=Path, help="result file (default: docs/benchmarks/<gpu>-...)")
    run.add_argument("--commit", help="commit to record where git cannot tell")
    data = argparse.ArgumentParser(add_help=False)
    data.add_argument("--seed", type=int, default=1, help="seed of the random data")
    race = argparse.ArgumentParser(add_help=False, parents=[data])
    race.add_argument("--rounds", type=int, default=13, help="samples of a contestant, at most")
    race.add_argument(
        "--rest", type=float, default=0, help="seconds between rounds (default: 0, a warm card)"
    )
    cells = argparse.ArgumentParser(add_help=False)
    cells.add_argument("--head-dim", type=int, nargs="+", help="head dims of the table")
    cells.add_argument("--seq", type=int, nargs="+", default=SEQS, help="sequence lengths")
    table = argparse.ArgumentParser(add_help=False, parents=[race, cells])
    half = argparse.ArgumentParser(add_help=False)
    half.add_argument("--kernel", default="auto", help="kernel forced on cufa (default: auto)")
    half.add_argument(
        "--peers",
        nargs="*",
        default=list(PREFILL_PEERS),
        help=f"besides the default, {' '.join(PREFILL_PEERS)}: flex (compiles for long), math, "
        "cufa_bfloat16 (beside float16)",
    )

    prefill = commands.add_parser(
        "prefill", parents=[run, table, half], help="16-bit prefill table"
    )
    gqa = commands.add_parser(
        "gqa", parents=[run, race, half], help="16-bit table of grouped heads, 64 on 8"
    )
    gqa.add_argument("--seq", type=int, nargs="+", default=GQA_SEQS, help="sequence lengths")
    for command, dtypes in ((prefill, HALF_DTYPES), (gqa, HALF_DTYPES[:1])):
        command.add_argument("--dtype", nargs="+", default=dtypes, choices=HALF_DTYPES)

    commands.add_parser(
        "headdims", parents=[run, race], help="head dims against each other, in one race"
    )

    sustained = commands.add_parser(
        "sustained", parents=[run, data], help="speed held for seconds, with clock and power"
    )
    sustained.add_argument("--seconds", type=float, default=4.0, help="time of a contestant")
    sustained.add_argument("--pause", type=float, default=3.0, help="seconds before it")

    fp32 = commands.add_parser("fp32", parents=[run, table], help="float32 table")
    fp32.add_argument("--kernel", default="fa2_fp32", help="kernel forced on cufa")
    fp32.add_argument("--peers", nargs="*", default=list(FP32_PEERS), help="besides cufa")
    for command in (prefill, gqa, fp32):
        command.add_argument("--scores", default="normal", choices=SCORES, help="of which data")
        command.add_argument(
            "--timing",
            default="events",
            choices=("auto", "graph", "events"),
            help="by CUDA-graph replay, which leaves the host's time out, by bursts of calls "
            "between events, or auto: replay where a call is shorter than 200 us",
        )

    host = commands.add_parser("host", parents=[run], help="host cost of one small call")
    host.add_argument("--kernel", default="auto", help="kernel forced on cufa (default: auto)")

    jit = commands.add_parser("jit", parents=[run], help="first call in a new process")
    jit.add_argument(
        "--kernel", nargs="+", default=["auto", "fa2_mma"], help="kernels for bfloat16"
    )

    explore = commands.add_parser("explore", parents=[run], help="the explorer's own time and aim")
    explore.add_argument("--kernel", default="fa2_mma", help="kernel to explore")
    explore.add_argument("--q", default="2,16,8192,128", help="shape of q, k and v")
    explore.add_argument("--dtype", default="bfloat16", choices=HALF_DTYPES)
    explore.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)

    tune = commands.add_parser("tune", parents=[run], help="what tuning the standard table gives")
    tune.add_argument("--dtype", default="bfloat16", choices=HALF_DTYPES)

    refactor = commands.add_parser(
        "refactor", parents=[run, data, cells], help="the standard tables before a change and after"
    )
    refactor.add_argument(
        "--before", required=True, help="git's revision before, or a folder with the package cufa"
    )
    refactor.add_argument(
        "--tables", nargs="+", default=list(TABLES), choices=TABLES, help="(default: all)"
    )
    refactor.add_argument("--rounds", type=int, help="samples of each (default: 40)")
    refactor.add_argument(
        "--append", action="store_true", help="keep the result file's rows of other cells"
    )
    refactor.add_argument(
        "--compile", action="store_true", help="what compiling takes instead; needs no GPU"
    )
    refactor.add_argument("--gpu", default="h200", help="to compile for (default: h200)")

    report = commands.add_parser("report", help="pages and plots from result files")
    report.add_argument("files", type=Path, nargs="*", help="default: all of docs/benchmarks")
    return top


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells of a prefill, gqa or fp32 run.

    Raises
    ------
    ValueError
        When a head dim or a length does not divide the standard table's sizes, or is not positive.
    """
    if options.bench == "fp32":
        return standard_cells("float32", options.head_dim or FP32_HEAD_DIMS, options.seq)
    cells: list[Cell] = []
    for dtype in options.dtype:
        if options.bench == "gqa":
            cells += gqa_cells(dtype, options.seq)
            continue
        head_dims = options.head_dim or PREFILL_HEAD_DIMS
        cells += standard_cells(dtype, head_dims, options.seq)
    return cells


def check(options: argparse.Namespace) -> None:
    """Check the options of a measurement, and that this machine can make it.

    Raises
    ------
    ValueError
        The options make no sense.
    CommandError
        CuPy, NVRTC or a GPU is missing.
    """
    has_peers = options.bench in ("prefill", "gqa", "fp32")
    if has_peers:
        cells_of(options)
    if options.bench in ("prefill", "gqa", "fp32", "headdims") and options.rounds < 1:
        raise ValueError("--rounds must be at least 1")
    if getattr(options, "rest", 0) < 0:
        raise ValueError("--rest must be at least 0")
    if options.bench == "sustained" and not (options.seconds > 0 and options.pause >= 0):
        raise ValueError("--seconds must be more than 0 and --pause at least 0")
    if options.bench == "refactor":
        check_refactor(options)
    machine.check_compiler()
    if options.bench == "refactor" and options.compile:
        return
    if has_peers:
        from benchmarks.peers import check_names  # which imports CuPy

        check_names(options.peers)
    machine.current_gpu("calls are timed, and need one")
    if options.bench == "refactor" and options.append:
        earlier_part(options, result_path(options))


def check_refactor(options: argparse.Namespace) -> None:
    """Check the options of a refactor run; ValueError as `check`."""
    before.resolve(options.before)
    devices.named(options.gpu)
    for name in options.tables:
        TABLES[name].cells(options.head_dim, options.seq)
    if options.rounds is not None and options.rounds < 1:
        raise ValueError("--rounds must be at least 1")


def forced_kernel(options: argparse.Namespace) -> str | None:
    """Return the kernel forced on cufa in all of a run, as `cufa.attention` takes it, or None."""
    if options.bench not in ("prefill", "gqa", "fp32", "host", "explore"):
        return None
    return None if options.kernel == "auto" else str(options.kernel)


def result_path(options: argparse.Namespace) -> Path:
    """Return the file that a run writes."""
    from benchmarks import environment, results

    if options.out is not None:
        return Path(options.out)
    kernel = forced_kernel(options)
    return results.default_path(RESULTS, environment.device_name(), options.bench, kernel)


def head_of(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what a run's result file begins with."""
    from benchmarks import environment

    head = environment.describe(options.bench, list(arguments), options.commit)
    if options.bench == "refactor":
        head["before"] = before.resolve(options.before)
    return head


def earlier_part(options: argparse.Namespace, path: Path) -> dict[str, Any] | None:
    """Return the result that a run adds to, or None; ValueError if it is of another run."""
    from benchmarks import results

    if not getattr(options, "append", False) or not path.exists():
        return None
    earlier = results.read(path)
    results.merged(earlier, {**head_of(options, ()), "rows": []})
    return earlier


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a benchmark, writing the result file anew after every row.

    Returns
    -------
    int
        The exit status: 1 when cufa could not run a cell, or no row came out.
    """
    # CuPy reads this before its first product; float32 means float32 here.
    os.environ["CUPY_TF32"] = "0"
    from benchmarks import results

    from cufa.explorer import ceilings
    from cufa.explorer.clock import CudaClock

    started = time.perf_counter()
    path = result_path(options)
    earlier = earlier_part(options, path)
    measured = ceilings.measure(CudaClock(), "bfloat16")
    if "gemm_tflops" not in measured:
        raise RuntimeError("no matrix product: cuBLAS is not installed, or memory is short")
    measured["gemm_bf16_tflops"] = measured.pop("gemm_tflops")
    print(f"ceilings: {measured}", flush=True)
    rows: list[dict[str, Any]] = []
    head: dict[str, Any] = {}
    source, contestants = _rows(options)
    for row in source:
        # Described after the first row, when the peers that are here have been imported.
        head = head or head_of(options, arguments)
        rows.append(row)
        result = {**head, "ceilings": measured, "rows": rows}
        results.write(path, results.merged(earlier, result) if earlier else result)
    print(f"{len(rows)} rows in {time.perf_counter() - started:.0f} s, {path}", flush=True)
    return 0 if rows and not (contestants and contestants.failed) else 1


def measure_compiling(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run ``refactor --compile``, writing the result file anew after every row; return 0."""
    from benchmarks import environment, refactor_compile, results

    bench = "refactor-compile"
    path = options.out or results.default_path(RESULTS, options.gpu, bench, None)
    head = environment.describe(bench, list(arguments), options.commit, device=options.gpu)
    head["before"] = before.resolve(options.before)
    rows: list[dict[str, Any]] = []
    rounds = options.rounds or refactor_compile.ROUNDS
    for row in refactor_compile.rows(options.before, options.tables, options.gpu, rounds):
        rows.append(row)
        results.write(path, {**head, "ceilings": {}, "rows": rows})
    print(path)
    return 0


def _rows(options: argparse.Namespace) -> tuple[Iterable[dict[str, Any]], Any]:
    """Return the rows of a benchmark as they come, and who counts the cells that failed."""
    kernel = forced_kernel(options)
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
    if options.bench == "refactor":
        from benchmarks.refactor import ROUNDS, Refactor

        field = Refactor(options.before, options.rounds or ROUNDS, options.seed)
        return field.rows(options.tables, options.head_dim, options.seq), field
    from benchmarks.contestants import Contestants

    from cufa.explorer.clock import CudaClock

    if options.bench == "sustained":
        from benchmarks import sustained

        contestants = Contestants(None, CUDNN)
        pace = options.seconds, options.pause
        return sustained.rows(contestants, *pace, options.seed), contestants
    from cufa.explorer.race import Budget

    clock = CudaClock(rest_s=options.rest)
    budget = Budget(rounds=options.rounds)
    if options.bench == "headdims":
        from benchmarks import headdims

        contestants = Contestants(None, CUDNN)
        return headdims.rows(contestants, clock, budget, options.seed), contestants
    from benchmarks import prefill

    contestants = Contestants(kernel, options.peers)
    how = options.seed, options.scores, options.timing
    return prefill.rows(contestants, cells_of(options), clock, budget, *how), contestants


def report(files: Sequence[Path]) -> int:
    """Write the page and the plot of each result file, and return the exit status.

    Without names of files it is all of them, and the figures that are made from several.
    """
    from benchmarks import scores
    from benchmarks.report import write_report

    for path in files or sorted(RESULTS.glob("*.json")):
        page, plot = write_report(path)
        print(f"{page}, {plot}")
    for plot in [] if files else scores.write_figures(RESULTS):
        print(plot)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    top = parser()
    options = top.parse_args(arguments)
    try:
        if options.bench == "report":
            return report(options.files)
        check(options)
    except (ValueError, OSError) as error:
        top.error(str(error))
    except CommandError as failure:
        top.exit(failure.status, f"{top.prog}: error: {failure}\n")
    if options.bench == "refactor" and options.compile:
        return measure_compiling(options, arguments)
    return measure(options, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
