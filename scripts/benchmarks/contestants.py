"""Who runs a cell: each contestant prepared, called once, and its result checked."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import cupy

from benchmarks.accuracy import max_errors
from benchmarks.calls import in_turn
from benchmarks.cells import Cell
from benchmarks.inputs import Operands, to_cupy
from benchmarks.peers import PEERS, cufa_call
from benchmarks.results import figures
from cufa.explorer import subject
from cufa.explorer.clock import Call
from cufa.specs.template_arguments import TemplateArguments
from cufa.specs.variant import Variant

CUFA = "cufa"

Case = TypeVar("Case")
Row = dict[str, Any]


def rows_of(cases: Iterable[Case], row_of: Callable[[Case], Row | None]) -> Iterator[Row]:
    """Yield the rows of the cases, such as cells, that have one, and print a line for each."""
    for case in cases:
        started = time.perf_counter()
        row = row_of(case)
        free_memory()
        if row is None:
            continue
        print(f"{case}: {figures(row)} [{time.perf_counter() - started:.1f} s]", flush=True)
        yield row


class Ready(NamedTuple):
    """The contestants of a cell, cufa among them, each of which has run it.

    `variant` is what cufa runs, `errors` are the largest absolute ones, and `gaps` says of peers
    that are here why they cannot run the cell.
    """

    cell: Cell
    variant: TemplateArguments
    calls: dict[str, Call]
    errors: dict[str, float]
    gaps: Mapping[str, str] = MappingProxyType({})

    def row(
        self, speeds: Mapping[str, float], replayed: Collection[str] = (), unit: str = "TFLOP/s"
    ) -> Row:
        """Return the result row of the cell.

        Parameters
        ----------
        speeds : mapping of str to float
            The figure of cufa and of each peer.
        replayed : collection of str
            Contestants that were timed by graph replay.
        unit : str
            Unit of the figures.
        """
        return {
            **self.cell.row(),
            "kernel": self.variant.kernel,
            "unit": unit,
            **columns({name: rounded(speed, 5) for name, speed in speeds.items()}),
            **columns({n: rounded(error, 4) for n, error in self.errors.items()}, "_maxerr"),
            **({"replayed": list(replayed)} if replayed else {}),
        }


def columns(figures: Mapping[str, Any], kind: str = "") -> Row:
    """Return a row's columns of cufa's figure and its peers', of a kind such as "_maxerr"."""
    peers = {name: figure for name, figure in figures.items() if name != CUFA}
    return {f"cufa{kind}": figures[CUFA], f"peers{kind}": peers}


class Contestants:
    """cufa, perhaps with a kernel forced on it, and its peers, in one cell after the other.

    `peers` are names of `makers`, which are `PEERS` by default; `failed` counts the cells that cufa
    could not run.
    """

    def __init__(
        self,
        kernel: str | None,
        peers: Iterable[str],
        makers: Mapping[str, Callable[[Any], Call]] | None = None,
    ) -> None:
        self._kernel = kernel
        self._peers = list(peers)
        self._makers = makers or PEERS
        self._missing: set[str] = set()
        self.failed = 0

    def ready(self, operands: Operands, *more: Operands) -> Ready | None:
        """Return those that can run a cell, or None where cufa cannot.

        Calls take the operands and those of `more`, other data of the cell, in turn.
        """
        cell = operands.cell
        calls, results, gaps = self._prepare((operands, *more))
        errors = self.errors(operands, results)
        for name in [name for name, error in errors.items() if not math.isfinite(error)]:
            gaps[name] = "gives results that are not finite"
            say(f"{cell}: {name} {gaps[name]}")
            del calls[name], errors[name]
        if CUFA not in calls:
            self.failed += 1
            return None
        return Ready(cell, self.planned(operands), calls, errors, gaps)

    def ours(self, operands: Any) -> Call:
        """Return cufa's call on operands."""
        return cufa_call(operands, self._kernel)

    def planned(self, operands: Any) -> TemplateArguments:
        """Return the variant that it runs."""
        return planned(operands, self._kernel)

    def errors(self, operands: Any, results: dict[str, Any]) -> dict[str, float]:
        """Return the largest error of each result."""
        q, k, v = operands.q, operands.k, operands.v
        return max_errors(cupy, operands.cell, (q, k, v), results)

    def _prepare(
        self, sets: Sequence[Operands]
    ) -> tuple[dict[str, Call], dict[str, Any], dict[str, str]]:
        """Return who can run the cell, the result of each with the first set, and who cannot."""
        calls: dict[str, Call] = {}
        results: dict[str, Any] = {}
        gaps: dict[str, str] = {}
        for name in [CUFA, *(peer for peer in self._peers if peer not in self._missing)]:
            try:
                if name == CUFA:
                    call = in_turn([self.ours(operands) for operands in sets])
                else:
                    call = in_turn([self._makers[name](operands) for operands in sets])
                results[name] = to_cupy(call())
                cupy.cuda.Device().synchronize()
            except ImportError as error:
                if name == CUFA:
                    raise
                self._missing.add(name)
                say(f"{name} is not here: {error}")
            except Exception as error:  # whatever a library raises, the others still run
                results.pop(name, None)
                gaps[name] = reason(error)
                say(f"{sets[0].cell}: {name} cannot: {gaps[name]}")
            else:
                calls[name] = call
        return calls, results, gaps


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
    subject.free_memory()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def say(text: str) -> None:
    """Tell why something is missing."""
    print(text, file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """Return what an error says, in a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def rounded(value: float, digits: int) -> float:
    """Return a figure rounded to `digits`."""
    return float(f"{value:.{digits}g}")
