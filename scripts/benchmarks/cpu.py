"""NumPy arrays: cufa, plain NumPy and PyTorch's SDPA, each on one thread of the CPU."""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from time import process_time_ns
from typing import Any, TypeVar

import numpy as np

import cufa
from benchmarks import accuracy, plain
from benchmarks.cells import Cell
from benchmarks.results import figures
from cufa.explorer.race import order_of

SHAPES = ((1, 8, 1024, 64), (4, 12, 512, 64), (1, 32, 2048, 128))
"""Batch, heads, sequence length and head dim."""

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
"""Variables that libraries of matrix products read when they are loaded."""

Name = TypeVar("Name", bound=Hashable)


def take_one_thread() -> None:
    """Start this process again, unless its environment holds libraries to one thread."""
    if any(os.environ.get(name) != number for name, number in ONE_THREAD.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ONE_THREAD})


def cells() -> list[tuple[Cell, Cell]]:
    """Return each shape without a mask and with the causal one."""
    full = [Cell("float32", b, h, h, s, s, d, d, False) for b, h, s, d in SHAPES]
    return [(cell, cell._replace(causal=True)) for cell in full]


def rows(pairs: list[tuple[Cell, Cell]], rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield two rows a shape, whose calls all take turns.

    Parameters
    ----------
    pairs : list of tuple of Cell
        As `cells` returns them.
    rounds : int
        Calls of a contestant.
    seed : int
        Seed of the random data.
    """
    rng = np.random.default_rng(seed)
    torch = _torch()
    for pair in pairs:
        shapes = pair[0].q_shape, pair[0].k_shape, pair[0].v_shape
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
        calls = [_calls(cell, (q, k, v), torch) for cell in pair]
        results = [{name: np.asarray(call()) for name, call in each.items()} for each in calls]
        named = {(i, name): each[name] for i, each in enumerate(calls) for name in each}
        us = medians(named, rounds)
        for i, cell in enumerate(pair):
            peers = {name: us[i, name] for name in results[i]}
            if cell.causal:
                peers["cufa_full"] = us[0, "cufa"]
            errors = accuracy.max_errors(np, cell, (q, k, v), results[i])
            row = {
                **cell.row(),
                "kernel": "numpy",
                "unit": "us",
                "cufa": peers.pop("cufa"),
                "peers": peers,
                "cufa_maxerr": errors.pop("cufa"),
                "peers_maxerr": errors,
            }
            print(f"{cell}: {figures(row)}", flush=True)
            yield row


def medians(calls: Mapping[Name, Callable[[], Any]], rounds: int) -> dict[Name, float]:
    """Return the microseconds of a call, by contestant.

    All take turns, each round in another order. The clock counts the time that the processor
    spends on this process, and leaves others out.
    """
    times: dict[Name, list[int]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds):
            for name in order_of(list(calls), index):
                start = process_time_ns()
                calls[name]()
                times[name].append(process_time_ns() - start)
    finally:
        gc.enable()
    return {name: round(statistics.median(ns) / 1e3, 1) for name, ns in times.items()}


def _torch() -> Any:
    """Return PyTorch on one thread, or None where it cannot be imported."""
    try:
        import torch
    except ImportError as error:
        print(f"torch is not here: {error}", flush=True)
        return None
    torch.set_num_threads(1)
    return torch


def _calls(cell: Cell, arrays: tuple[Any, ...], torch: Any) -> dict[str, Callable[[], Any]]:
    q, k, v = arrays
    causal, scale = cell.causal, cell.scale
    calls: dict[str, Callable[[], Any]] = {
        "cufa": lambda: cufa.attention(q, k, v, causal=causal),
        "numpy": lambda: plain.attention(np, q, k, v, causal=causal, scale=scale),
    }
    if torch is not None:
        tensors = [torch.from_numpy(x) for x in arrays]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls["torch"] = lambda: sdpa(*tensors, is_causal=causal)
    return calls
