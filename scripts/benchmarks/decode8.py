"""Decoding over K and V of 8 bits, next to the same in 16, by graph replay."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import cupy
import numpy as np

import cufa
from benchmarks import graphs
from benchmarks.cells import Cell
from benchmarks.contestants import CUFA, Contestants, free_memory, rounded
from benchmarks.decode import Pages, Way, call_of
from benchmarks.inputs import Operands
from benchmarks.models import sets_beyond_l2
from benchmarks.race import Budget
from benchmarks.results import figures
from cufa import device as devices
from cufa.explorer.clock import Call, Clock

_E4M3_BYTE = 7  # digits that float16 has behind those of e4m3
_LARGEST = {"fp8": 448, "int8": 127}
_SCALE_BYTES = 4

# Batch, keys, heads of Q and of K and V, head dim, new tokens: of K and V in 8 bits 268 MB or more.
_SHAPES = (
    *((16, 8192, 32, 8, 128, 1), (8, 32768, 32, 8, 128, 1), (1, 131072, 32, 8, 128, 1)),
    *((128, 1024, 32, 8, 128, 1), (16, 8192, 64, 8, 128, 1), (32, 16384, 16, 2, 128, 1)),
    *((16, 16384, 64, 8, 64, 1), (8, 8192, 16, 8, 256, 1), (16, 8192, 32, 8, 128, 4)),
)
_PAGES = (0, 16, 64)


class Way8(NamedTuple):
    """How K and V are kept in 8 bits, and where they lie: pages of no keys are one piece."""

    kind: str
    page_size: int

    @property
    def name(self) -> str:
        """Name of the contestant."""
        return f"{self.kind}, pages of {self.page_size}" if self.page_size else self.kind


WAYS = tuple(Way8(kind, page_size) for page_size in _PAGES for kind in _LARGEST)
_IN_16_BITS = {size: Way(f"pages of {size}" if size else CUFA, page_size=size) for size in _PAGES}


def cells() -> list[Cell]:
    """Return the cells of the table: all in bfloat16, and the first in float16, too."""
    found = [Cell("bfloat16", b, hq, hk, sq, kv, d, d, sq > 1) for b, kv, hq, hk, d, sq in _SHAPES]
    return [*found, found[0]._replace(dtype="float16")]


def quantized(x: Any, kind: str) -> tuple[Any, Any]:
    """Return (b, h, s, d) numbers as 8 bits, and a scale for each key and head."""
    x = x.astype(np.float32)
    scales = cupy.abs(x).max(axis=-1) / _LARGEST[kind]
    x /= scales[..., None]
    if kind == "int8":
        return cupy.rint(x).astype(np.int8), scales
    bits = (x * 2.0**-8).astype(np.float16).view(np.uint16)  # with the exponents of e4m3
    half = 1 << (_E4M3_BYTE - 1)
    values = cupy.minimum((bits & 0x7FFF) + half >> _E4M3_BYTE, 0x7E) | (bits >> 8 & 0x80)
    return values.astype(np.uint8), scales


class Decoders8(Contestants):
    """`cufa.decode` in 16 bits, contiguous and in pages, and in the ways of 8 bits."""

    def __init__(self) -> None:
        makers: dict[str, Any] = {
            way.name: functools.partial(call_of, way=way)
            for size, way in _IN_16_BITS.items()
            if size
        }
        makers |= {way.name: functools.partial(call_of_8_bits, way=way) for way in WAYS}
        super().__init__(None, makers, makers)

    def ours(self, operands: Operands) -> Call:
        """Return the call in 16 bits on a cache in one piece."""
        return call_of(operands, _IN_16_BITS[0])


def call_of_8_bits(operands: Operands, way: Way8) -> Call:
    """Return the call that decodes in a way."""
    cell, q = operands.cell, operands.q
    (k, k_scale), (v, v_scale) = (quantized(x, way.kind) for x in (operands.k, operands.v))
    options: dict[str, Any] = {"lengths": cupy.full(cell.b, cell.sk, cupy.int32)}
    if way.page_size:
        pages = Pages(cell, way.page_size)
        k, k_scale, v, v_scale = map(pages.of, (k, k_scale, v, v_scale))
        options["block_table"] = pages.table
    options |= {"k_scale": k_scale, "v_scale": v_scale}
    return lambda: cufa.decode(q, k, v, **options)


def rows(
    contestants: Contestants,
    cases: Iterable[Cell],
    clock: Clock,
    budget: Budget,
    seed: int,
    read_gbs: float,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell and way of 8 bits, and print a line for each.

    Parameters
    ----------
    contestants : Contestants
    cases : iterable of Cell
    clock : Clock
    budget : Budget
        The budget of a cell.
    seed : int
        Seed of the random data.
    read_gbs : float
        How fast the card reads, which `of_read` is a share of.
    """
    rng = cupy.random.default_rng(seed)
    l2_bytes = devices.current().l2_bytes
    for cell in cases:
        sets = [Operands(cell, rng) for _ in range(2 * sets_beyond_l2(cell, l2_bytes))]
        ready = contestants.ready(*sets)
        del sets
        if ready is None:
            continue
        ms, replayed = graphs.medians(ready.calls, clock, budget, "graph")
        us = {name: 1e3 * each for name, each in ms.items()}
        for way in WAYS:
            if way.name in us:
                row = _row(cell, way, us, ready.errors, replayed, read_gbs)
                print(
                    f"{cell}, {way.name}: {figures(row)}, {row['of_read']:.1%} of reading",
                    flush=True,
                )
                yield row
        del ready
        free_memory()


def _row(
    cell: Cell,
    way: Way8,
    us: dict[str, float],
    errors: dict[str, float],
    replayed: list[str],
    read_gbs: float,
) -> dict[str, Any]:
    """Return the row of a cell that is decoded in a way."""
    key_bytes = cell.d + cell.dv + 2 * _SCALE_BYTES
    gbs = cell.b * cell.hk * cell.sk * key_bytes / us[way.name] / 1e3
    names = {way.name: CUFA}
    in_16_bits = _IN_16_BITS[way.page_size].name
    if in_16_bits in us:
        names[in_16_bits] = "16_bits"
    peers = {name: shown for name, shown in names.items() if shown != CUFA}
    return {
        **cell.row(),
        "kv": cell.sk,
        "page_size": way.page_size,
        "mode": way.kind,
        "kernel": f"decode_{way.kind}",
        "unit": "us",
        "cufa": rounded(us[way.name], 5),
        "cufa_gbs": rounded(gbs, 5),
        "of_read": rounded(gbs / read_gbs, 4),
        "peers": {shown: rounded(us[name], 5) for name, shown in peers.items()},
        "cufa_maxerr": rounded(errors[way.name], 4),
        "peers_maxerr": {shown: rounded(errors[name], 4) for name, shown in peers.items()},
        "replayed": [shown for name, shown in names.items() if name in replayed],
    }
