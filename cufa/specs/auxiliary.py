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
        Name of the ``__global__`` function, and of its file.
    params : dtype
        The struct that its parameter begins with.
    threads : int
        Threads of a block; 0 where they depend on the instance.
    moved : tuple of str
        The tensors that it reads and writes, for the model of the gradients' times.
    """

    name: str
    params: np.dtype
    threads: int = 0
    moved: tuple[str, ...] = ()

    def parameter(self, score: Sequence[str] = ()) -> np.dtype:
        """Return the layout of what a launch passes by value."""
        return whole(self.params, score)
