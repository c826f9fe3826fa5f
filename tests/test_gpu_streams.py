"""Streams that are destroyed while kernels that overlap are pending."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import random_inputs
from test_gpu_fa3 import same

import cufa
from cufa.device import Device

pytestmark = pytest.mark.gpu

_PROCESSES = 8
_SECONDS = 90  # far more than they take


def calls_of(cupy: Any) -> list[Callable[[], Any]]:
    """Return calls whose kernels overlap and take some 0.2 ms."""
    rng = np.random.default_rng(1)
    given = [
        cupy.asarray(x) for x in random_inputs(rng, "float16", b=2, hq=150, sq=300, sk=250, d=128)
    ]
    q, k, v = (
        cupy.asarray(x) for x in random_inputs(rng, "float16", b=64, hq=8, sq=1, sk=2000, d=128)
    )
    return [lambda: cufa.attention(*given, causal=True), lambda: cufa.decode(q, k, v)]


def in_a_stream_of_its_own(cupy: Any, call: Callable[[], None]) -> None:
    with cupy.cuda.Stream(non_blocking=True):
        call()


def in_the_stream_of_a_thread(cupy: Any, call: Callable[[], None]) -> None:
    def in_thread() -> None:
        with cupy.cuda.Stream.ptds:
            call()

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()


def in_a_stream_of_somebody_else(cupy: Any, call: Callable[[], None]) -> None:
    runtime = cupy.cuda.runtime
    pointer = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
    with cupy.cuda.ExternalStream(pointer):
        call()
    runtime.streamDestroy(pointer)


def in_a_graph(cupy: Any, call: Callable[[], None]) -> None:
    call()  # sets memory aside
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    with cupy.cuda.Stream(non_blocking=True):
        graph.launch()
    graphs.append(graph)


graphs: list[Any] = []  # they stay
WAYS = {
    way.__name__: way
    for way in (
        *(in_a_stream_of_its_own, in_the_stream_of_a_thread, in_a_stream_of_somebody_else),
        in_a_graph,
    )
}


def run(way: str) -> None:
    """Do what each of the processes does."""
    import cupy

    for call in calls_of(cupy):
        expected = call()
        cupy.cuda.get_current_stream().synchronize()
        for _ in range(4):
            outs: list[Any] = []

            def calls(call: Callable[[], Any] = call, outs: list[Any] = outs) -> None:
                outs.extend(call() for _ in range(5))

            for _ in range(20):
                WAYS[way](cupy, calls)
            cupy.cuda.runtime.deviceSynchronize()
            assert all(bool(same(cupy, out, expected)) for out in outs)
            outs.clear()
            cupy.get_default_memory_pool().free_all_blocks()  # of streams that are gone


@pytest.mark.parametrize("way", WAYS)
def test_streams_that_are_gone_beside_other_processes(hopper: Device, way: str) -> None:
    """Where these share the GPU, kernels that overlap would wait without end."""
    program = f"import test_gpu_streams; test_gpu_streams.run({way!r})"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    processes = [subprocess.Popen(command, env=environment) for _ in range(_PROCESSES)]
    try:
        assert [process.wait(_SECONDS) for process in processes] == [0] * _PROCESSES
    finally:
        for process in processes:
            process.kill()
            process.wait()
