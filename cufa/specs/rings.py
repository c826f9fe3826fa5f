"""The rings of tiles of keys of a block that decodes."""

from __future__ import annotations

from typing import NamedTuple


class Ring(NamedTuple):
    """How a block that has a multiprocessor for itself holds keys.

    Attributes
    ----------
    bn, stages : int
        Keys of a tile, and tiles of a ring.
    warps : int
        Warps of the block.
    team : int
        How many of its warps share a ring.
    """

    bn: int
    stages: int
    warps: int
    team: int

    @property
    def keys(self) -> int:
        """How many all rings hold, and ask for at a time."""
        return self.bn * self.stages * self.warps // self.team
