"""Speed held for seconds: one contestant after the other, with the card's clock and power."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import cupy

from benchmarks import monitor
from benchmarks.cells import Cell, standard_cells
from benchmarks.contestants import Contestants, columns, rows_of, say
from benchmarks.inputs import Operands
from benchmarks.monitor import Card, Monitor
from cufa.explorer.clock import Call
from cufa.explorer.race import order_of
from cufa.explorer.standard import HEAD_DIMS

SEQ = 16384

BATCH = 4
"""Calls between two events."""

AHEAD = 4
"""Batches in the launch queue: some ten milliseconds of work, and a few launches."""


def rows(
    contestants: Contestants, seconds: float, pause: float, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a row a cell that cufa can run, and print a line for each.

    Each contestant runs for some seconds, after a pause in which the card cools.
    """
    rng = cupy.random.default_rng(seed)
    turns = itertools.count()
    with Monitor(monitor.command(cupy.cuda.Device().pci_bus_id)) as card:

        def row_of(cell: Cell) -> dict[str, Any] | None:
            return _row(contestants, Operands(cell, rng), next(turns), card, seconds, pause)

        yield from rows_of(standard_cells("bfloat16", HEAD_DIMS, (SEQ,)), row_of)


def _row(
    contestants: Contestants,
    operands: Operands,
    index: int,
    card: Monitor,
    seconds: float,
    pause: float,
) -> dict[str, Any] | None:
    """Return the row of one cell; who comes first depends on its index."""
    ready = contestants.ready(operands)
    if ready is None:
        return None
    tflops: dict[str, float] = {}
    states: dict[str, Card] = {}
    for name in order_of(list(ready.calls), index):
        time.sleep(pause)
        started = time.perf_counter()
        tflops[name] = ready.cell.tflops(held_ms(ready.calls[name], seconds))
        stopped = time.perf_counter()
        states[name] = card.medians((started + stopped) / 2, stopped)
        if None in states[name]:
            say(f"{ready.cell}: no clock or no power of {name}: {card.complaint}")
    row = ready.row(tflops)
    for field in Card._fields:
        row |= columns({name: getattr(state, field) for name, state in states.items()}, f"_{field}")
    return row


def held_ms(call: Call, seconds: float) -> float:
    """Return the milliseconds a call, over calls that follow each other for some seconds.

    The host waits while more than `AHEAD` batches are queued: it is never far before the device,
    which never waits for it.
    """
    event, calls = cupy.cuda.Event, 0
    cupy.cuda.Device().synchronize()
    start = last = event()
    start.record()
    queued = deque([start])
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(BATCH):
            call()
        calls += BATCH
        last = event()
        last.record()
        queued.append(last)
        if len(queued) > AHEAD:
            queued.popleft().synchronize()
    last.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, last)) / calls
