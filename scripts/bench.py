#!/usr/bin/env python3
"""Measure cufa against its peers, and make tables and plots from the results.

    python scripts/bench.py prefill --kernel fa2_mma
    python scripts/bench.py gqa
    python scripts/bench.py headdims
    python scripts/bench.py fp32
    python scripts/bench.py models
    python scripts/bench.py backward
    python scripts/bench.py decode
    python scripts/bench.py decode --before HEAD~1 --out before-and-after.json
    python scripts/bench.py decode8
    python scripts/bench.py generate
    python scripts/bench.py host
    python scripts/bench.py jit
    python scripts/bench.py cpu
    python scripts/bench.py regret
    python scripts/bench.py refactor --before v0.2
    python scripts/bench.py costs
    python scripts/bench.py fit docs/benchmarks/h200-costs.json
    python scripts/bench.py report

All but the last two write ``docs/benchmarks/<gpu>-<bench>.json`` and need a CUDA GPU; ``cpu`` needs
none and writes ``docs/benchmarks/cpu.json``. ``fit`` derives the planner's costs from such a file.
``report`` makes a Markdown page and a PNG plot of each, which needs matplotlib. The method is
described in ``docs/benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks"

# Measure this checkout, whether or not a cufa is installed.
sys.path.insert(0, str(ROOT))

from benchmarks import before, environment, results  # noqa: E402
from benchmarks.options import cells_of, check, drawn_of, forced_kernel, parser  # noqa: E402

from cufa.cli.parser import CommandError  # noqa: E402

CUDNN = ("cudnn",)


def result_path(options: argparse.Namespace) -> Path:
    """Return the file that a run writes."""
    if options.out is not None:
        return Path(options.out)
    if options.bench == "cpu":
        return RESULTS / "cpu.json"
    return results.default_path(
        RESULTS, environment.device_name(), options.bench, forced_kernel(options)
    )


def head_of(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what a run's result file begins with."""
    head = environment.describe(options.bench, list(arguments), options.commit)
    if getattr(options, "before", None) is not None:
        head["before"] = before.resolve(options.before)
    return head


def earlier_part(options: argparse.Namespace, path: Path) -> dict[str, Any] | None:
    """Return the result that a run adds to, or None; ValueError if it is of another run."""
    if not getattr(options, "append", False) or not path.exists():
        return None
    earlier = results.read(path)
    results.merged(earlier, {**head_of(options, ()), "rows": []})
    return earlier


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a benchmark, writing the result file again after every row.

    Returns
    -------
    int
        The exit status: 1 when cufa could not run a cell, or no row came out.
    """
    # CuPy reads this before its first product; float32 means float32 here.
    os.environ["CUPY_TF32"] = "0"
    started = time.perf_counter()
    path = result_path(options)
    earlier = earlier_part(options, path)
    measured = {} if options.bench == "cpu" else _ceilings()
    rows: list[dict[str, Any]] = []
    head: dict[str, Any] = {}
    with ExitStack() as held:
        source, field = _rows(options, measured, held)
        for row in source:
            # Described after the first row, when the peers that are here have been imported.
            head = head or head_of(options, arguments)
            rows.append(row)
            result = {**head, "ceilings": measured, "rows": rows}
            results.write(path, results.merged(earlier, result) if earlier else result)
    print(f"{len(rows)} rows in {time.perf_counter() - started:.0f} s, {path}", flush=True)
    return 0 if rows and not (field and field.failed) else 1


def _ceilings() -> dict[str, float]:
    from cufa.explorer import ceilings
    from cufa.explorer.clock import CudaClock

    measured = ceilings.measure(CudaClock(), "bfloat16")
    if "gemm_tflops" not in measured:
        raise RuntimeError("no matrix product: cuBLAS is not installed, or memory is short")
    measured["gemm_bf16_tflops"] = measured.pop("gemm_tflops")
    print(f"ceilings: {measured}", flush=True)
    return measured


def _rows(
    options: argparse.Namespace, measured: dict[str, float], held: ExitStack
) -> tuple[Iterable[dict[str, Any]], Any]:
    """Return the rows of a benchmark as they come, and who counts the cells that failed.

    Context managers that the rows need until the last one are entered into `held`.
    """
    o, kernel = options, forced_kernel(options)
    if o.bench == "host":
        from benchmarks import host

        return host.rows(kernel), None
    if o.bench == "cpu":
        from benchmarks import cpu

        return cpu.rows(cpu.cells(), o.rounds, o.seed), None
    if o.bench == "jit":
        from benchmarks import jit

        if o.features:
            return jit.rows(jit.feature_cases(o.features), o.rounds, o.at_once), None
        return jit.rows(jit.standard_cases(o.kernel), o.rounds, o.at_once), None
    if o.bench == "generate":
        from benchmarks import generate

        sizes = o.model, o.batch, o.prompt, o.new
        return generate.rows(*sizes, o.peers, o.rounds, measured["read_gbs"]), None
    if o.bench == "costs":
        from benchmarks import costs

        return costs.rows(o.seed, o.seconds), None
    if o.bench == "regret":
        from benchmarks.regret import Regret

        found = Regret(drawn_of(o), o.seed, o.kernels)
        return found.rows(), found
    if o.bench == "refactor":
        from benchmarks.refactor import ROUNDS, Refactor

        field = Refactor(o.before, o.rounds or ROUNDS, o.seed)
        return field.rows(o.tables, o.head_dim, o.seq), field
    if o.bench == "fp8-error":
        from benchmarks import fp8_error

        return fp8_error.rows(o.seed), None
    from benchmarks import headdims, prefill
    from benchmarks.contestants import Contestants
    from benchmarks.race import Budget

    from cufa.explorer.clock import CudaClock

    contestants = Contestants(kernel, getattr(o, "peers", CUDNN))
    clock, budget = CudaClock(rest_s=o.rest), Budget(rounds=o.rounds)
    if o.bench == "headdims":
        return headdims.rows(contestants, clock, budget, o.seed), contestants
    if o.bench == "decode":
        from benchmarks import decode

        older = held.enter_context(before.beside(o.before)) if o.before else None
        decoders = decode.Decoders(o.peers, older)
        return decode.rows(decoders, decode.cells(), clock, budget, o.seed), decoders
    if o.bench == "decode8":
        from benchmarks import decode8

        eight_bits = decode8.Decoders8()
        limits = clock, budget, o.seed, measured["read_gbs"]
        return decode8.rows(eight_bits, decode8.cells(), *limits), eight_bits
    if o.bench == "masks":
        from benchmarks import masks

        return masks.rows(o.peers, clock, budget, o.seed), None
    if o.bench == "fp8":
        from benchmarks import fp8
        from benchmarks.cells import fp8_cells

        eight = fp8.EightBits(o.peers)
        return fp8.rows(eight, fp8_cells(o.head_dim), clock, budget, o.seed), eight
    if o.bench == "backward":
        from benchmarks import backward, backward_cases

        gradients = backward.Gradients(o.peers)
        cases = backward_cases.cases(o.only, o.head_dim)
        return backward.rows(gradients, cases, clock, budget, o.seed), gradients
    if o.bench == "models":
        from benchmarks import models
        from benchmarks.model_shapes import chosen

        shapes = models.Models(kernel, o.peers)
        return models.rows(shapes, chosen(o.models), clock, budget, o.seed), shapes
    how = o.seed, o.scores, o.timing
    return prefill.rows(contestants, cells_of(o), clock, budget, *how), contestants


def report(files: Sequence[Path]) -> int:
    """Write the page and the plot of each result file, and return the exit status.

    Without names of files it is all of them.
    """
    from benchmarks.report import write_report

    for path in files or sorted(RESULTS.glob("*.json")):
        page, plot = write_report(path)
        print(f"{page}, {plot}")
    return 0


def fit(path: Path) -> int:
    """Write the planner's costs from a result file, and return the exit status."""
    from benchmarks import cost_fit

    print(cost_fit.write(results.read(path), ROOT))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    top = parser()
    options = top.parse_args(arguments)
    try:
        if options.bench == "report":
            return report(options.files)
        if options.bench == "fit":
            return fit(options.file)
        check(options)
        if getattr(options, "append", False):  # before the work
            earlier_part(options, result_path(options))
    except CommandError as failure:
        top.exit(2, f"{top.prog}: error: {failure}\n")
    except (ValueError, OSError) as error:
        top.error(str(error))
    if options.bench == "cpu":
        from benchmarks import cpu

        cpu.take_one_thread()
    return measure(options, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
