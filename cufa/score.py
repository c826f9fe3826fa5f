"""The parts that scores are made of: what becomes of Q K^T before the softmax.

A part is a struct of ``kernels/score.cuh`` and an entry of `PARTS`; `Problem.score` says which ones
a call has.
"""

from __future__ import annotations

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
    parameters : tuple of Parameter
        What a launch appends to ``Params``, in order.
    """

    name: str
    parameters: tuple[Parameter, ...] = ()


PARTS: dict[str, Part] = {part.name: part for part in (Part("Causal"),)}
"""The parts, by name."""
