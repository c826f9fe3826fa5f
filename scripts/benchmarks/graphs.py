"""Bursts as CUDA graphs: a replay costs the host one launch, whatever a call costs it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import cupy

from benchmarks.contestants import reason, say
from benchmarks.race import Budget, CaptureError, Race
from cufa.explorer.clock import Call, Clock

REPLAYED_BELOW_MS = {"auto": 0.2, "graph": math.inf, "events": 0.0}
"""Races whose fastest call takes less are of replays, by the name of a way of timing."""


def medians(
    calls: Mapping[str, Call], clock: Clock, budget: Budget, timing: str
) -> tuple[dict[str, float], list[str]]:
    """Race calls, and return the median milliseconds of each and the names of those replayed.

    Parameters are those of `begin`, and the budget of the race.
    """
    race, replayed = begin(calls, clock, timing)
    race.run(budget)
    return {name: race.median(name) for name in calls}, replayed


def begin(calls: Mapping[str, Call], clock: Clock, timing: str) -> tuple[Race[str], list[str]]:
    """Return a race that has begun, and the contestants whose calls it replays.

    Parameters
    ----------
    calls : mapping of str to callable
    clock : Clock
    timing : str
        A key of `REPLAYED_BELOW_MS`.
    """
    race = Race(calls, clock, Budget().burst_ms)
    race.estimate()
    if min(race.first_ms.values()) >= REPLAYED_BELOW_MS[timing]:
        return race, []
    complaints = race.replay(capture)
    for name, why in complaints.items():
        say(f"{name} is timed by events: {why}")
    return race, [name for name in calls if name not in complaints]


def capture(call: Call, calls: int) -> Call:
    """Capture calls of a contestant, and return a call that replays them on the current stream.

    The calls allocate memory of the graph's own, which is there before they are captured.

    Raises
    ------
    CaptureError
        The contestant cannot be captured.
    """
    try:
        result = call()
        first = result[0] if isinstance(result, tuple) else result
        of_torch = type(first).__module__.partition(".")[0] == "torch"
        cupy.cuda.Device().synchronize()
        return _captured_by_torch(call, calls) if of_torch else _captured_by_cupy(call, calls)
    except Exception as error:  # whatever a library raises, its calls can still be timed
        raise CaptureError(reason(error)) from error


@contextmanager
def one_stream() -> Iterator[None]:
    """Have CuPy and PyTorch queue all on one stream, on which PyTorch's calls are captured, too.

    PyTorch differentiates on the stream of the forward pass, which a capture must not leave. The
    stream does not wait for others: all that they were given has ended before and after.
    """
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    stream, device = _torch_stream(), cupy.cuda.Device()
    device.synchronize()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        yield
    device.synchronize()


@cache
def _torch_stream() -> Any:
    import torch

    return torch.cuda.Stream()


@cache
def _side_stream() -> Any:
    """Return a stream to capture on, the same for all: what libraries keep for it is kept once."""
    return cupy.cuda.Stream(non_blocking=True)


def _captured_by_cupy(call: Call, calls: int) -> Call:
    pool, stream = cupy.cuda.MemoryPool(), _side_stream()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        call()
        stream.synchronize()
        stream.begin_capture()
        try:
            for _ in range(calls):
                call()
        finally:
            graph = stream.end_capture()

    return partial(_launch, graph, pool)


def _launch(graph: Any, memory: Any) -> None:
    """Launch a graph, whose memory lives as long."""
    graph.launch()


def _captured_by_torch(call: Call, calls: int) -> Call:
    import torch

    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    if stream == torch.cuda.default_stream():
        stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    # Differentiation has threads of its own, whose calls may not end the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph.replay  # type: ignore[no-any-return]
