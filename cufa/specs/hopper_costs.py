"""Tiles that the planner chooses from on Hopper, and what they cost, in microseconds.

The rows of ``hopper_costs.csv``, which ``python scripts/bench.py fit`` writes.
"""

from __future__ import annotations

from importlib import resources

from cufa.specs.costs import Cost
from cufa.specs.tile_shape import TileShape

Costs = dict[tuple[int, int, bool], dict[TileShape, Cost]]
"""Costs of tiles, by head dims and whether the mask is causal."""


def read_table(text: str) -> Costs:
    """Return the costs that a table holds, whose first two lines are a remark and the headings."""
    costs: Costs = {}
    for line in text.splitlines()[2:]:
        words = line.split(",")
        d, dv, causal, *numbers, ping_pong = map(int, words[:9])
        launch, wave, *others = (float(word) for i, word in enumerate(words[9:]) if i != 2)
        keys = tuple(map(float, words[11].split()))
        cost = Cost._make((launch, wave, keys, *others))
        shape = TileShape._make((*numbers, bool(ping_pong)))
        costs.setdefault((d, dv, bool(causal)), {})[shape] = cost
    return costs


COSTS = read_table(resources.files("cufa.specs").joinpath("hopper_costs.csv").read_text("utf-8"))
