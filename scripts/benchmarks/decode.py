"""Decoding: a few new tokens and a long cache, contiguous and in pages, by graph replay."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import cupy
import numpy as np

import cufa
from benchmarks import graphs
from benchmarks.cells import Cell
from benchmarks.contestants import CUFA, Contestants, free_memory, rounded
from benchmarks.inputs import Operands
from benchmarks.models import sets_beyond_l2
from benchmarks.peers import PEERS
from benchmarks.race import Budget
from benchmarks.results import figures
from cufa import device as devices
from cufa.compiler import jit
from cufa.explorer.clock import Call, Clock
from cufa.planner import decode as planner
from cufa.problem.parse import parse
from cufa.specs.variant import Variant

EXACT = "exact"
"""cufa with true maxima on a cache in one piece, in the rows of other ways."""

BEFORE = "before"
"""An older package that decodes in the row's way."""


class Way(NamedTuple):
    """How cufa decodes, and where the cache lies.

    Attributes
    ----------
    name : str
        Name of the contestant.
    page_size : int
        0 for a cache in one piece.
    unified_max : float, optional
        As in `cufa.decode`.
    """

    name: str
    page_size: int = 0
    unified_max: float | None = None

    @property
    def before(self) -> str:
        """Name of the contestant that is the older package."""
        return f"{self.name}, {BEFORE}"


WAYS = (
    Way(CUFA),
    Way("unified", unified_max=0.0),
    Way("unified, taken again", unified_max=1000.0),  # far from all scores
    *(Way(f"pages of {size}", page_size=size) for size in (16, 64, 256)),
)

# Batch, keys, heads of Q and of K and V, head dim, new tokens.
_SHAPES = (
    *((1, kv, 32, 8, 128, 1) for kv in (1024, 8192, 32768, 131072)),
    *((b, 8192, 32, 8, 128, 1) for b in (4, 8, 16)),
    *((32, 2048, 32, 8, 128, 1), (64, 4096, 32, 8, 128, 1)),
    *((128, 2048, 32, 8, 128, 1), (256, 512, 32, 8, 128, 1)),
    *((8, 8192, 32, 32, 128, 1), (16, 8192, 32, 1, 128, 1)),
    *((16, 8192, 64, 8, 64, 1), (8, 8192, 16, 8, 256, 1), (1, 8192, 64, 8, 64, 1)),
    *((b, kv, 32, 8, 128, sq) for sq in (4, 16) for b, kv in ((16, 8192), (1, 32768))),
)


def cells() -> list[Cell]:
    """Return the cells of the table."""
    return [Cell("bfloat16", b, hq, hk, sq, kv, d, d, sq > 1) for b, kv, hq, hk, d, sq in _SHAPES]


class Decoders(Contestants):
    """`cufa.decode` with lengths on the device, contiguous and in pages, and its peers.

    Parameters
    ----------
    peers : iterable of str
        Keys of `PEERS`, which are handed the cache as K and V.
    older : module, optional
        The package as it was, which decodes in the ways that have true maxima, too.
    """

    def __init__(self, peers: Iterable[str], older: ModuleType | None = None) -> None:
        peers = list(peers)
        makers = {name: PEERS[name] for name in peers}
        makers |= {way.name: functools.partial(call_of, way=way) for way in WAYS[1:]}
        if older is not None:
            exact = (way for way in WAYS if way.unified_max is None)
            makers |= {
                way.before: functools.partial(call_of, way=way, package=older) for way in exact
            }
        super().__init__(None, makers, makers)

    def ours(self, operands: Operands) -> Call:
        """Return the call with true maxima on a cache in one piece."""
        return call_of(operands, WAYS[0])

    def planned(self, operands: Operands) -> Variant:
        """Return the variant of that call."""
        return _variant(operands, WAYS[0])


def _variant(operands: Operands, way: Way) -> Variant:
    """Return the variant that decodes in a way, of a cache in one piece."""
    defaults = {n: each.default for n, each in inspect.signature(cufa.decode).parameters.items()}
    arrays = {"q": operands.q, "k_cache": operands.k, "v_cache": operands.v}
    problem, _ = parse({**defaults, **arrays, "unified_max": way.unified_max}, cupy)
    return planner.plan_splits(problem, devices.current()).variant


def taken_again(operands: Operands, way: Way) -> int:
    """Return how often a warp takes its keys of a unit again in one call."""
    counter = jit.module(_variant(operands, way), devices.current()).get_global("decode_recomputed")
    count = cupy.ndarray((1,), cupy.int32, counter)
    count[...] = 0
    call_of(operands, way)()
    return int(count[0])


def call_of(operands: Operands, way: Way, package: ModuleType = cufa) -> Call:
    """Return the call of a package that decodes in a way."""
    if way.page_size:
        return _paged(operands, way.page_size, package)
    q, k, v = operands.q, operands.k, operands.v
    lengths = cupy.full(operands.cell.b, operands.cell.sk, cupy.int32)
    return lambda: package.decode(q, k, v, lengths=lengths, unified_max=way.unified_max)


class Pages:
    """Pages that lie in no order, and hold all keys of a cell.

    Attributes
    ----------
    table : array
        The block table.
    """

    def __init__(self, cell: Cell, page_size: int) -> None:
        count = cell.sk // page_size
        if count * page_size != cell.sk:
            raise ValueError(f"{cell.sk} keys fill no pages of {page_size}")
        order = np.random.default_rng(0).permutation(cell.b * count).astype(np.int32)
        self.table = cupy.asarray(order).reshape(cell.b, count)
        self._page_size = page_size

    def of(self, x: Any) -> Any:
        """Return an array (b, heads, s, ...) in pages."""
        b, heads, _, *dims = x.shape
        parts = x.reshape(b, heads, -1, self._page_size, *dims).swapaxes(1, 2)
        pages = cupy.empty((self.table.size, heads, self._page_size, *dims), x.dtype)
        pages[self.table.ravel()] = parts.reshape(pages.shape)
        return pages


def _paged(operands: Operands, page_size: int, package: ModuleType) -> Call:
    cell, q, pages = operands.cell, operands.q, Pages(operands.cell, page_size)
    k, v = pages.of(operands.k), pages.of(operands.v)
    lengths = cupy.full(cell.b, cell.sk, cupy.int32)
    return lambda: package.decode(q, k, v, lengths=lengths, block_table=pages.table)


def rows(
    contestants: Contestants, cases: Iterable[Cell], clock: Clock, budget: Budget, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell and way in which its cache lies, and print a line for each.

    All ways are in one race with the peers. Calls take as many sets of operands in turn as keep
    caches out of L2.

    Parameters
    ----------
    contestants : Contestants
    cases : iterable of Cell
    clock : Clock
    budget : Budget
        The budget of a cell.
    seed : int
        Seed of the random data.
    """
    rng = cupy.random.default_rng(seed)
    l2_bytes = devices.current().l2_bytes
    for cell in cases:
        sets = [Operands(cell, rng) for _ in range(sets_beyond_l2(cell, l2_bytes))]
        ready = contestants.ready(*sets)
        if ready is None:
            continue
        unified = (way for way in WAYS if way.unified_max is not None and way.name in ready.calls)
        again = {way.name: taken_again(sets[0], way) for way in unified}
        del sets
        ms, replayed = graphs.medians(ready.calls, clock, budget, "graph")
        us = {name: 1e3 * each for name, each in ms.items()}
        for way in WAYS:
            if way.name in us:
                row = _row(cell, way, us, ready.errors, replayed)
                if way.name in again:
                    row |= {"unified_max": way.unified_max, "taken_again": again[way.name]}
                print(f"{cell}, {way.name}: {figures(row)}", flush=True)
                yield row
        del ready
        free_memory()


def _row(
    cell: Cell, way: Way, us: dict[str, float], errors: dict[str, float], replayed: list[str]
) -> dict[str, Any]:
    """Return the row of a cell that is decoded in a way."""
    ours = way.name
    ways = {name for each in WAYS for name in (each.name, each.before)}
    names = {name: name for name in us if name not in ways}
    if way != WAYS[0]:
        names[CUFA] = EXACT
    if way.before in us:
        names[way.before] = BEFORE
    cache_bytes = 2 * cell.b * cell.hk * cell.sk * (cell.d + cell.dv)
    return {
        **cell.row(),
        "kv": cell.sk,
        "page_size": way.page_size,
        "mode": "exact" if way.unified_max is None else way.name,
        "kernel": "decode",
        "unit": "us",
        "cufa": rounded(us[ours], 5),
        "cufa_gbs": rounded(cache_bytes / us[ours] / 1e3, 5),
        "peers": {shown: rounded(us[name], 5) for name, shown in names.items()},
        "cufa_maxerr": rounded(errors[ours], 4),
        "peers_maxerr": {shown: rounded(errors[name], 4) for name, shown in names.items()},
        "replayed": [shown for name, shown in {ours: CUFA, **names}.items() if name in replayed],
    }
