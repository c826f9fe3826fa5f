"""AuxiliarySpec: a kernel that computes no attention, and needs no plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cufa.specs.params import whole
from cufa.specs.structs import struct


class AuxiliarySpec(NamedTuple):
    """A kernel that computes no attention, as the rest of the package knows it.

    Attributes
    ----------
    name : str
        Name of the ``__global__`` function, and of its file.
    params : dtype
        The struct that its parameter begins with.
    threads : int
        Threads of a block.
    moved : tuple of str
        The tensors that it reads and writes, for the model of the gradients' times.
    """

    name: str
    params: np.dtype
    threads: int = 128
    moved: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, *members: tuple[Any, str], threads: int = 128) -> AuxiliarySpec:
        """Return a spec whose parameter has these members, as `struct` takes them."""
        return cls(name, struct(*members), threads)

    def parameter(self, score: Sequence[str] = ()) -> np.dtype:
        """Return the layout of what a launch passes by value."""
        return whole(self.params, score)
