"""What compiling takes: the variants of the standard tables, as they were and as they are."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks import before
from benchmarks.cells import TABLES, Cell
from benchmarks.summary import geomean
from cufa.compiler.nvrtc import uncached

ROUNDS = 11


class Source(NamedTuple):
    """A text, the template instantiation that is compiled of it, and the options of its package."""

    text: str
    name_expression: str
    options: tuple[str, ...]


def rows(older: str, names: Iterable[str], gpu: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant that the tables run, and print a line for each.

    The two packages' are compiled in turns, without any cache, and several variants at once. A
    figure is the shortest of its processor times, as other work on the machine only adds to them.
    Needs no GPU.

    Parameters
    ----------
    older : str
        The package as it was, see `benchmarks.before.resolve`.
    names : iterable of str
        Keys of `TABLES`.
    gpu : str
        For which variants are planned: a name that `cufa.device.named` knows.
    rounds : int
        Times that each is compiled.
    """
    os.environ["CUFA_TUNED"] = "0"
    pairs = list(dict.fromkeys(_pairs(older, names, gpu)))
    shortest = functools.partial(_shortest_s, rounds=rounds)
    quotients = []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for pair, (before_s, after_s) in zip(pairs, pool.map(shortest, pairs), strict=True):
            quotients.append(after_s / before_s)
            old, new = (source.name_expression for source in pair)
            line = f"{new}: {after_s:.3f} s, before {before_s:.3f} s, {quotients[-1]:.3f}"
            print(line, flush=True)
            yield {
                "variant": new,
                "before": old,
                "cold_s": round(after_s, 4),
                "before_cold_s": round(before_s, 4),
            }
    middle, most = geomean(quotients), max(quotients)
    print(f"{middle:.3f} times as long as before in geometric mean, {most:.3f} at most", flush=True)


def _pairs(older: str, names: Iterable[str], gpu: str) -> list[tuple[Source, Source]]:
    """Return what each cell of the tables is compiled of, by the package as it was and as it is."""
    import cufa

    cells = [(cell, TABLES[name].kernel) for name in names for cell in TABLES[name].cells()]
    with before.loaded(older) as package:
        return [
            (_source(package, cell, kernel, gpu), _source(cufa, cell, kernel, gpu))
            for cell, kernel in cells
        ]


def _source(package: ModuleType, cell: Cell, kernel: str | None, gpu: str) -> Source:
    device = before.part(package, "device").named(gpu)
    planner = before.part(package, "planner.plan", "plan")
    problem = package.Problem.of_shapes(
        cell.q_shape, cell.k_shape, cell.v_shape, dtype=cell.dtype, causal=cell.causal
    )
    variant = planner.plan(problem, device, kernel).variant
    text = before.part(package, "compiler.source", "source").text(variant.kernel)
    options = before.part(package, "compiler.jit", "jit")._raw_module_options(device)
    return Source(text, variant.name_expression, options)


def _shortest_s(pair: tuple[Source, Source], rounds: int) -> tuple[float, float]:
    """Return the shortest time of each of two."""
    times: dict[Source, list[float]] = {source: [] for source in pair}
    for index in range(rounds):
        for source in pair[:: -1 if index % 2 else 1]:
            times[source].append(_compile_s(source))
    first, second = (min(times[source]) for source in pair)
    return first, second


def _compile_s(source: Source) -> float:
    from cupy.cuda import nvrtc

    options = uncached(source.options)
    started = time.thread_time()
    program = nvrtc.createProgram(source.text, "kernel.cu", (), ())
    try:
        nvrtc.addNameExpression(program, source.name_expression)
        nvrtc.compileProgram(program, options)
        nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    return time.thread_time() - started
