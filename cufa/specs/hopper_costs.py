"""Tiles that the planner chooses from on Hopper, and what they cost, in microseconds.

A row of ``hopper_costs.csv`` has head dims, a causal mask or none, a tile, and its cost. Spaces
separate the costs of a tile of keys.
"""

from __future__ import annotations

from importlib import resources

from cufa.specs.costs import Cost
from cufa.specs.kernel_spec import TileShape

Key = tuple[int, int, bool]
"""The head dims of Q and K and of V, and whether there is a causal mask."""

COLUMNS = ("head_dim", "head_dim_v", "causal", *TileShape._fields, *Cost._fields)


def _read() -> dict[Key, dict[TileShape, Cost]]:
    text = resources.files("cufa.specs").joinpath("hopper_costs.csv").read_text(encoding="utf-8")
    costs: dict[Key, dict[TileShape, Cost]] = {}
    for line in text.splitlines():
        if line.startswith(("#", COLUMNS[0])):
            continue
        *numbers, launch, wave, keys, blank, fetched, ragged, unaligned, sustained = line.split(",")
        d, dv, causal, *shape, ping_pong = map(int, numbers)
        rest = map(float, (blank, fetched, ragged, unaligned, sustained))
        cost = Cost(float(launch), float(wave), tuple(map(float, keys.split())), *rest)
        tile = TileShape._make((*shape, bool(ping_pong)))
        costs.setdefault((d, dv, bool(causal)), {})[tile] = cost
    return costs


COSTS = _read()
