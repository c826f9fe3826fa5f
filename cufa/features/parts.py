"""The parts that scores are made of: what becomes of Q K^T before the softmax.

A part is an entry of `PARTS`, a feature's, or one that was made of a caller's own expression, see
`cufa.features.expression`; `Problem.score` says which ones a call has.
"""

from __future__ import annotations

import functools

from cufa.features import FEATURES
from cufa.features.part import Part
from cufa.features.user_functions import BLOCKS, OWN

PARTS: dict[str, Part] = {part.name: part for kind in FEATURES for part in kind.PARTS}
"""The parts, by name; in a score they have this order, and a caller's own come last."""

_own: dict[str, Part] = {}


def register(part: Part) -> None:
    """Register a part that is not in a feature's `PARTS`; its name says all of it."""
    _own[part.name] = part


def part_named(name: str) -> Part:
    """Return a part; KeyError if none has this name."""
    return PARTS.get(name) or _own[name]


def kind_of(name: str) -> str:
    """Return the name of a part; of a caller's own part the beginning of its name."""
    kind = name.partition("_")[0]
    return kind if kind in OWN.values() else name


ARRAYS = tuple(dict.fromkeys(part.argument for part in PARTS.values() if part.axes))
"""The arguments that are arrays which parts read, in order."""


@functools.cache
def edges(score: tuple[str, ...]) -> int:
    """Return how many edges a score has, left and right; with any, rows see different keys."""
    parts = [part_named(name) for name in score]
    return any(part.left_edge for part in parts) + any(part.right_edge for part in parts)


def are_apart(score: tuple[str, ...]) -> bool:
    """Whether the warpgroups of a tile may visit different keys: by edges that do not jump."""
    jumps = any(part_named(name).jumps for name in score)
    return edges(score) > 0 and BLOCKS not in score and not jumps


def is_uneven(score: tuple[str, ...]) -> bool:
    """Whether tiles of rows may visit different numbers of keys."""
    return edges(score) > 0 or BLOCKS in score
