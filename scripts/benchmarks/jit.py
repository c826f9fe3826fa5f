"""Compile time: the first call of a new process, with a cold and with a warm disk cache."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from benchmarks import environment

_WARM_ROUNDS = 2  # nothing is compiled there, which scatters less


class Case(NamedTuple):
    """One standard variant, or one with a feature: what the child process is asked to run."""

    dtype: str
    head_dim: int
    causal: bool
    kernel: str
    feature: str = ""

    def arguments(self) -> list[str]:
        """Return the command-line arguments of the child."""
        given = [self.dtype, str(self.head_dim), str(int(self.causal)), self.kernel]
        return [*given, self.feature] if self.feature else given

    def __str__(self) -> str:
        """Label of the row."""
        mask = "causal" if self.causal else "full"
        return f"{self.dtype} d{self.head_dim} {self.feature or mask} {self.kernel}"


def standard_cases(kernels: list[str]) -> list[Case]:
    """Return the standard variants: bfloat16 with each of `kernels`, float32 as cufa chooses."""
    masks = (False, True)
    half = [Case("bfloat16", d, c, k) for k in kernels for d in (64, 128, 256) for c in masks]
    return half + [Case("float32", d, c, "auto") for d in (64, 128) for c in masks]


def feature_cases(head_dims: Iterable[int]) -> list[Case]:
    """Return a case for each feature of the table of masks, at its shortest sequences."""
    from benchmarks import masks

    dims = tuple(head_dims)
    found = (
        Case(case.cell.dtype, case.cell.d, case.cell.causal, "auto", case.feature)
        for case in masks.cases()
        if case.cell.d in dims
    )
    return list(dict.fromkeys(found))


def rows(cases: Iterable[Case], rounds: int, at_once: int = 1) -> Iterator[dict[str, Any]]:
    """Yield a row a case, and print a line for each, when all are measured.

    In each round, all cases take turns, `at_once` of them at a time. A new process runs over a
    fresh cache directory, which it finds empty; and in the first rounds another one, which finds
    what that has left. The figures are the least: what else runs on a shared host, the other
    processes among it, makes the same compilation take longer for a while, and nothing makes it
    shorter. One process before them is not measured: it reads the libraries from disk.
    """
    cases = list(cases)
    for case in cases[:1]:
        _first_calls_s(case, 1)
    cold: dict[Case, list[float]] = {case: [] for case in cases}
    warm: dict[Case, list[float]] = {case: [] for case in cases}
    with ThreadPoolExecutor(at_once) as pool:
        for i in range(rounds):
            calls = [2 if i < _WARM_ROUNDS else 1] * len(cases)
            for case, seconds in zip(cases, pool.map(_first_calls_s, cases, calls), strict=True):
                cold[case].append(seconds[0])
                warm[case] += seconds[1:]
    for case in cases:
        row = {
            "variant": str(case),
            "cold_s": round(min(cold[case]), 4),
            "warm_s": round(min(warm[case]), 4),
        }
        print(f"{case}: cold {row['cold_s']} s, warm {row['warm_s']} s", flush=True)
        yield row


def _first_calls_s(case: Case, calls: int) -> list[float]:
    """Return the seconds of the first calls of new processes that share a cache, new as well."""
    with tempfile.TemporaryDirectory() as cache:
        return [_first_call_s(case, cache) for _ in range(calls)]


def _first_call_s(case: Case, cache: str) -> float:
    """Return the seconds of the first call of a new process; RuntimeError when that fails."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.first_call", *case.arguments()],
            env=environment.of_child(cache),
            capture_output=True,
            text=True,
            timeout=300,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{case}: no result in {error.timeout:g} s") from error
    if child.returncode:
        raise RuntimeError(f"{case}: {child.stderr.strip()}")
    return float(child.stdout.split()[-1])
