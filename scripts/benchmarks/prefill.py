"""The prefill tables: cufa and its peers over the standard cells."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

import cupy

from benchmarks.accuracy import max_errors
from benchmarks.cells import Cell
from benchmarks.inputs import Operands, to_cupy
from benchmarks.peers import PEERS, cufa_call
from cufa.explorer.timing import Budget, Call, CudaClock, race

CUFA = "cufa"


class Table:
    """Measures cells one after the other.

    Parameters
    ----------
    kernel : str or None
        The kernel forced on cufa; None leaves the choice to it.
    peers : iterable of str
        Keys of `PEERS`.
    budget : Budget
        Time a cell.
    seed : int
        Of the random data.

    Attributes
    ----------
    failed : int
        Cells that cufa could not run; they have no row.
    """

    def __init__(
        self, *, kernel: str | None, peers: Iterable[str], budget: Budget, seed: int
    ) -> None:
        self._kernel = kernel
        self._peers = list(peers)
        self._budget = budget
        self._rng = cupy.random.default_rng(seed)
        self._clock = CudaClock()
        self._missing: set[str] = set()
        self.failed = 0

    def rows(self, cells: Iterable[Cell]) -> Iterator[dict[str, Any]]:
        """Yield a result row a cell, and print a line for each."""
        for cell in cells:
            started = time.perf_counter()
            row = self._measure(cell)
            _free_memory()
            if row is None:
                self.failed += 1
                continue
            figures = " ".join(f"{name} {figure:.4g}" for name, figure in row["peers"].items())
            seconds = time.perf_counter() - started
            print(f"{cell}: cufa {row['cufa']:.4g} | {figures} [{seconds:.1f} s]", flush=True)
            yield row

    def _measure(self, cell: Cell) -> dict[str, Any] | None:
        operands = Operands(cell, self._rng)
        calls, results = self._prepare(operands)
        errors = max_errors(cupy, cell, (operands.q, operands.k, operands.v), results)
        results.clear()
        for name in [name for name, error in errors.items() if not math.isfinite(error)]:
            _say(f"{cell}: {name} gives results that are not finite")
            del calls[name], errors[name]
        if CUFA not in calls:
            return None
        speeds = {n: cell.tflops(ms) for n, ms in race(calls, self._clock, self._budget).items()}
        return {
            **cell.row(),
            "kernel": self._kernel or planned_kernel(operands),
            "unit": "TFLOP/s",
            "cufa": _rounded(speeds.pop(CUFA), 5),
            "peers": {name: _rounded(speed, 5) for name, speed in speeds.items()},
            "cufa_maxerr": _rounded(errors.pop(CUFA), 4),
            "peers_maxerr": {name: _rounded(error, 4) for name, error in errors.items()},
        }

    def _prepare(self, operands: Operands) -> tuple[dict[str, Call], dict[str, Any]]:
        """Return the contestants that can run the cell and the result of a first call of each."""
        calls: dict[str, Call] = {}
        results: dict[str, Any] = {}
        for name in [CUFA, *(peer for peer in self._peers if peer not in self._missing)]:
            try:
                call = cufa_call(operands, self._kernel) if name == CUFA else PEERS[name](operands)
                results[name] = to_cupy(call())
                cupy.cuda.Device().synchronize()
            except ImportError as error:
                if name == CUFA:
                    raise
                self._missing.add(name)
                _say(f"{name} is not here: {error}")
            except Exception as error:  # whatever a library raises, the others still run
                results.pop(name, None)
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                _say(f"{operands.cell}: {name} cannot: {reason}")
            else:
                calls[name] = call
        return calls, results


def planned_kernel(operands: Operands) -> str:
    """Return the name of the kernel that cufa chooses by itself."""
    import cufa
    from cufa.plan import Plan

    plan = cufa.explain(operands.q, operands.k, operands.v, causal=operands.cell.causal)
    return cast(Plan, plan).variant.kernel


def _free_memory() -> None:
    """Return cached memory, which is of little use to the next cell's other shapes."""
    cupy.cuda.Device().synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
