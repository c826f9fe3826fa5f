"""The shapes of real models: cufa and its peers by graph replay, and what a call costs the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import cupy

from benchmarks import graphs, host_clock
from benchmarks.cells import Cell
from benchmarks.contestants import Contestants, columns, rounded, rows_of
from benchmarks.inputs import Operands
from benchmarks.model_shapes import Shape, kind_of
from benchmarks.peers import PEERS, cufa_call
from benchmarks.race import Budget
from cufa import device as devices
from cufa.explorer.clock import Call, Clock

HOST_CALLS = 12
"""Calls of a batch."""

HOST_BATCHES = 8

INVARIANT = "batch_invariant"
"""The column of cufa's time in this mode."""


class Models(Contestants):
    """`cufa.attention`, the same with `batch_invariant`, and the peers.

    Parameters
    ----------
    kernel : str or None
        Forced on cufa.
    peers : iterable of str
        Keys of `PEERS`.
    """

    def __init__(self, kernel: str | None, peers: Iterable[str]) -> None:
        def as_alone(operands: Operands) -> Call:
            return cufa_call(operands, kernel, batch_invariant=True)

        super().__init__(kernel, [INVARIANT, *peers], {INVARIANT: as_alone, **PEERS})


def rows(
    contestants: Contestants, shapes: Iterable[Shape], clock: Clock, budget: Budget, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a result row a shape that cufa can run, and print a line for each.

    Times are those of the GPU, by replay. Keys and values that are a call's own were written just
    before in a model, and are in L2 here, too, as far as they fit. A cache's are old: calls
    take as many sets of operands in turn as keep them out of it.

    Parameters
    ----------
    contestants : Contestants
    shapes : iterable of Shape
    clock : Clock
    budget : Budget
        The budget of a shape.
    seed : int
        Seed of the random data.
    """
    rng = cupy.random.default_rng(seed)
    l2_bytes = devices.current().l2_bytes

    def row_of(shape: Shape) -> dict[str, Any] | None:
        sets = [Operands(shape.cell, rng) for _ in range(sets_of(shape.cell, l2_bytes))]
        ready = contestants.ready(*sets)
        if ready is None:
            return None
        ms, replayed = graphs.medians(ready.calls, clock, budget, "graph")
        us = {name: 1e3 * each for name, each in ms.items()}
        as_alone = us.pop(INVARIANT)
        errors = {name: ready.errors[name] for name in us}
        batch = {name: [ready.calls[name]] * HOST_CALLS for name in us}
        host_us = host_clock.medians(lambda: batch, HOST_BATCHES)
        return {
            "model": shape.model,
            **ready._replace(errors=errors).row(
                us, [each for each in replayed if each in us], "us"
            ),
            INVARIANT: rounded(as_alone, 5),
            **columns(host_us, "_host_us"),
            **({"gaps": dict(ready.gaps)} if ready.gaps else {}),
            **({"sets": len(sets)} if len(sets) > 1 else {}),
        }

    return rows_of(shapes, row_of)


def sets_of(cell: Cell, l2_bytes: int) -> int:
    """Return the sets of operands whose caches leave none of one in L2 until its next turn."""
    return sets_beyond_l2(cell, l2_bytes) if kind_of(cell.row()) == "cache" else 1


def sets_beyond_l2(cell: Cell, l2_bytes: int) -> int:
    """Return the sets of operands of which next to nothing is read from L2.

    Keys and values fill it 32 times between two uses of a set. A kernel that says that they may
    leave L2 first keeps a part of it whatever follows: with twice, a quarter of what it read.
    """
    cache_bytes = 2 * cell.b * cell.hk * cell.sk * (cell.d + cell.dv)
    return 1 + -(-32 * l2_bytes // cache_bytes)
