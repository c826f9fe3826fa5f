"""Who runs a cell: each contestant prepared, called once, and its result checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import cupy

from benchmarks.accuracy import max_errors
from benchmarks.cells import Cell
from benchmarks.inputs import Operands, to_cupy
from benchmarks.peers import PEERS, Maker, cufa_call
from cufa.explorer import stage
from cufa.explorer.clock import Call
from cufa.variant import Variant

CUFA = "cufa"


class Ready(NamedTuple):
    """The contestants of a cell, cufa among them, each of which has run it.

    `variant` is what cufa runs, and `errors` are the largest absolute ones.
    """

    cell: Cell
    variant: Variant
    calls: dict[str, Call]
    errors: dict[str, float]

    def row(self, tflops: Mapping[str, float]) -> dict[str, Any]:
        """Return the result row of the cell, with the TFLOP/s of cufa and of its peers."""
        figures = {name: rounded(figure, 5) for name, figure in tflops.items()}
        errors = {name: rounded(error, 4) for name, error in self.errors.items()}
        return {
            **self.cell.row(),
            "kernel": self.variant.kernel,
            "unit": "TFLOP/s",
            "cufa": figures.pop(CUFA),
            "peers": figures,
            "cufa_maxerr": errors.pop(CUFA),
            "peers_maxerr": errors,
        }


class Contestants:
    """cufa, perhaps with a kernel forced on it, and its peers, in one cell after the other.

    `peers` are names of `makers`, which are `PEERS` by default; `failed` counts the cells that cufa
    could not run.
    """

    def __init__(
        self, kernel: str | None, peers: Iterable[str], makers: Mapping[str, Maker] | None = None
    ) -> None:
        self._kernel = kernel
        self._peers = list(peers)
        self._makers = makers or PEERS
        self._missing: set[str] = set()
        self.failed = 0

    def ready(self, operands: Operands) -> Ready | None:
        """Return those that can run a cell, or None where cufa cannot."""
        cell = operands.cell
        calls, results = self._prepare(operands)
        errors = max_errors(cupy, cell, (operands.q, operands.k, operands.v), results)
        for name in [name for name, error in errors.items() if not math.isfinite(error)]:
            say(f"{cell}: {name} gives results that are not finite")
            del calls[name], errors[name]
        if CUFA not in calls:
            self.failed += 1
            return None
        return Ready(cell, planned(operands, self._kernel), calls, errors)

    def _prepare(self, operands: Operands) -> tuple[dict[str, Call], dict[str, Any]]:
        """Return the contestants that can run the cell and the result of a first call of each."""
        calls: dict[str, Call] = {}
        results: dict[str, Any] = {}
        for name in [CUFA, *(peer for peer in self._peers if peer not in self._missing)]:
            try:
                if name == CUFA:
                    call = cufa_call(operands, self._kernel)
                else:
                    call = self._makers[name](operands)
                results[name] = to_cupy(call())
                cupy.cuda.Device().synchronize()
            except ImportError as error:
                if name == CUFA:
                    raise
                self._missing.add(name)
                say(f"{name} is not here: {error}")
            except Exception as error:  # whatever a library raises, the others still run
                results.pop(name, None)
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                say(f"{operands.cell}: {name} cannot: {reason}")
            else:
                calls[name] = call
        return calls, results


def planned(operands: Operands, kernel: str | None) -> Variant:
    """Return the variant that cufa runs on operands, with a kernel forced on it or None."""
    import cufa
    from cufa.planner.plan import Plan

    q, k, v = operands.q, operands.k, operands.v
    plan = cufa.explain(q, k, v, causal=operands.cell.causal, kernel=kernel)
    return cast(Plan, plan).variant


def free_memory() -> None:
    """Return cached memory, which is of little use to the next cell's other shapes."""
    cupy.cuda.Device().synchronize()
    stage.free_memory()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def say(text: str) -> None:
    """Tell why something is missing."""
    print(text, file=sys.stderr, flush=True)


def rounded(value: float, digits: int) -> float:
    """Return a figure with so many digits."""
    return float(f"{value:.{digits}g}")
