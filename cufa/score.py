"""The parts that scores are made of: what becomes of Q K^T before the softmax.

A part is a struct of ``kernels/score.cuh`` and an entry of `PARTS`; `Problem.score` says which ones
a call has.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Parameter(NamedTuple):
    """A run-time parameter of a part.

    Attributes
    ----------
    name : str
        Of the struct's member, and of the attribute of a `Problem` that holds its value.
    dtype : str
        As NumPy writes it, such as "i4".
    """

    name: str
    dtype: str


class Part(NamedTuple):
    """A part of a score.

    Attributes
    ----------
    name : str
        Of the struct.
    argument : str
        Of the call, which asks for it.
    parameters : tuple of Parameter
        What a launch appends to ``Params``, in order.
    left_edge, right_edge : bool
        Whether it leaves out keys before the first, or after the last, that a query sees.
    """

    name: str
    argument: str
    parameters: tuple[Parameter, ...] = ()
    left_edge: bool = False
    right_edge: bool = False


_SOFTCAP = Parameter("softcap_log2", "f4"), Parameter("softcap_inverse", "f4")

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part("Softcap", "softcap", _SOFTCAP),
        Part("FineSoftcap", "softcap", _SOFTCAP),
        Part("ExactSoftcap", "softcap", _SOFTCAP),
        Part("Causal", "causal", right_edge=True),
        Part("TopLeft", "causal", right_edge=True),
        Part("WindowLeft", "window", (Parameter("window_left", "i4"),), left_edge=True),
        Part("WindowRight", "window", (Parameter("window_right", "i4"),), right_edge=True),
    )
}
"""The parts, by name; in a score they have this order."""

MAX_WINDOW = 2**30
"""A bound of a window that is no bound, and the longest sequences that a window is for."""

SOFTCAPS = {"bfloat16": "Softcap", "float16": "FineSoftcap", "float32": "ExactSoftcap"}
"""That of each dtype: as accurate as its other arithmetic."""


@functools.cache
def edges(score: tuple[str, ...]) -> int:
    """Return how many edges a score has, left and right; with any, rows see different keys."""
    parts = [PARTS[name] for name in score]
    return any(part.left_edge for part in parts) + any(part.right_edge for part in parts)
