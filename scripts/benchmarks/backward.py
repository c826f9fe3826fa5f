"""Gradients: cufa and its peers by graph replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import cupy

from benchmarks import graphs
from benchmarks.backward_cases import Case
from benchmarks.backward_inputs import Data
from benchmarks.backward_peers import PEERS, cufa_gradients
from benchmarks.contestants import Contestants, rows_of
from benchmarks.gradient_errors import max_errors
from benchmarks.race import Budget
from cufa import device as devices
from cufa.explorer.clock import Call, Clock
from cufa.planner.backward_model import explained
from cufa.problem.problem import Problem
from cufa.specs.template_arguments import TemplateArguments
from cufa.tuned import user_table


class Gradients(Contestants):
    """`cufa.attention_backward` and the peers.

    Parameters
    ----------
    peers : iterable of str
        Keys of `PEERS`.
    """

    def __init__(self, peers: Iterable[str]) -> None:
        super().__init__(None, peers, PEERS)

    def ours(self, operands: Data) -> Call:
        """Return cufa's call on operands."""
        return cufa_gradients(operands)

    def planned(self, operands: Data) -> TemplateArguments:
        """Return the variant of the products that it runs."""
        return planned(operands.case)

    def errors(self, operands: Data, results: dict[str, Any]) -> dict[str, float]:
        """Return the largest error of each, by the largest number of the array."""
        return max_errors(cupy, operands, results)


def planned(case: Case) -> TemplateArguments:
    """Return the variant of the products of a case."""
    cell = case.cell
    shapes = cell.q_shape, cell.k_shape, cell.v_shape
    problem = Problem.of_shapes(*shapes, dtype=cell.dtype, **case.options)
    if case.lengths:
        problem = problem._replace(kv="Varlen", sequences=len(case.lengths))
    device = devices.current()
    table = user_table(device)
    return explained(problem, device, "qkv", case.deterministic, table=table).variant


def rows(
    contestants: Contestants, cases: Iterable[Case], clock: Clock, budget: Budget, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a result row a case that cufa can run, and print a line for each.

    Times are those of the GPU, by replay, of all kernels that the gradients take.

    Parameters
    ----------
    contestants : Contestants
    cases : iterable of Case
    clock : Clock
    budget : Budget
        The budget of a case.
    seed : int
        Seed of the random data.
    """
    rng = cupy.random.default_rng(seed)

    def row_of(case: Case) -> dict[str, Any] | None:
        with graphs.one_stream():
            ready = contestants.ready(Data(case, rng))
            if ready is None:
                return None
            ms, replayed = graphs.medians(ready.calls, clock, budget, "graph")
        speeds = {name: case.flops / each / 1e9 for name, each in ms.items()}
        gaps = {"gaps": dict(ready.gaps)} if ready.gaps else {}
        return {**case.row(), **ready.row(speeds, replayed), **gaps}

    return rows_of(cases, row_of)
