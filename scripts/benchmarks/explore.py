"""The explorer itself: two cold explorations, and whether their winners are the fastest."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import environment
from cufa import device as devices
from cufa.compiler.nvrtc import Compiled
from cufa.explorer.build import compile_all
from cufa.explorer.exploration import COLUMN_OF_ARGUMENT
from cufa.explorer.race import Budget, medians
from cufa.explorer.stage import Stage
from cufa.problem import Problem
from cufa.variant import Variant

RUNS = 2
ROUNDS = 15


def rows(kernel: str, shape: str, dtype: str, causal: bool) -> Iterator[dict[str, Any]]:
    """Yield a row an exploration, and print a line for each.

    An exploration is the command ``python -m cufa explore`` in a new process whose caches are
    empty. Then all variants that one of them found to be right are timed in `ROUNDS` rounds, none
    left out early, to say which is the fastest and how the winners compare with it. `shape` is that
    of q, k and v, such as "2,16,8192,128".
    """
    found = [_explore(kernel, shape, dtype, causal) for _ in range(RUNS)]
    right = (_variant(row) for _, table in found for row in table if row["correct"])
    variants = list(dict.fromkeys(right))
    q = tuple(int(n) for n in shape.split(","))
    again = _time_all(Problem.of_shapes(q, q, q, dtype=dtype, causal=causal), variants)
    best = min(again, key=again.__getitem__)
    for seconds, table in found:
        winner = _variant(table[0])
        row = {
            "variants": len(table),
            "seconds": round(seconds, 1),
            "winner": str(winner),
            "winner_us": round(again[winner], 2),
            "best": str(best),
            "best_us": round(again[best], 2),
        }
        print(row, flush=True)
        yield row


def _variant(row: dict[str, Any]) -> Variant:
    """Return the variant of an exported row."""
    arguments = {name: row[column] for name, column in COLUMN_OF_ARGUMENT.items()}
    return Variant(**{**arguments, "score": tuple(arguments["score"])})


def _explore(
    kernel: str, shape: str, dtype: str, causal: bool
) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds and the rows of one exploration."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, "-m", "cufa", "explore", "--q", shape, "--dtype", dtype]
        command += ["--kernel", kernel, "--json", str(path)] + ["--causal"] * causal
        started = time.perf_counter()
        subprocess.run(
            command, env=environment.of_child(folder), check=True, stdout=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - started
        return seconds, json.loads(path.read_text(encoding="utf-8"))["rows"]


def _time_all(problem: Problem, variants: list[Variant]) -> dict[Variant, float]:
    """Return the microseconds of every variant, all timed in every round."""
    device = devices.current()
    stage = Stage(problem, None, device)
    cubins = {
        built.variant: built.compiled.cubin
        for built in compile_all(variants, device.arch)
        if isinstance(built.compiled, Compiled)
    }
    calls = {variant: stage.ready(variant, cubin) for variant, cubin in cubins.items()}
    for call in calls.values():
        call()
    times = medians(calls, stage.clock(), Budget(rounds=ROUNDS))
    return {variant: 1e3 * ms for variant, ms in times.items()}
