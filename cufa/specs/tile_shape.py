"""The size of a tile, and what else is free in a variant."""

from __future__ import annotations

from typing import NamedTuple


class TileShape(NamedTuple):
    """The template arguments of a `Variant` that are free for a given problem."""

    bm: int
    bn: int
    stages: int
    warps: int
    blocks_per_sm: int
    ping_pong: bool = False
