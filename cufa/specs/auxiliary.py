"""AuxiliarySpec: a kernel that computes no attention, and needs no plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cufa.specs.params import whole


class AuxiliarySpec(NamedTuple):
    """A kernel that computes no attention, as the rest of the package knows it.

    Attributes
    ----------
    name : str
        Name of the ``__global__`` function, of its file, and of its spec's file.
    params : dtype
        The struct that its parameter begins with.
    inputs, outputs : tuple of str
        The tensors that it reads and writes, as `params` names them.
    threads : int
        Threads of a block; 0 where they depend on the instance.
    types, numbers : tuple of str
        The template arguments that are element types, which come first, and those that are numbers.
    takes_mask : bool
        Whether the last one is a part of a score, a mask.
    takes_score : bool
        Whether the last ones are a score and the way of finding Q, K and V.
    """

    name: str
    params: np.dtype
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    threads: int = 0
    types: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    takes_mask: bool = False
    takes_score: bool = False

    def parameter(self, score: Sequence[str] = ()) -> np.dtype:
        """Return the layout of what a launch passes by value."""
        return whole(self.params, score)
