"""The parameters of a model and their gradients, in one array each."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
from models import Array


class Parameter(NamedTuple):
    """A tensor and its gradient, which layers write: views of the arrays that hold all."""

    value: Array
    gradient: Array


class Parameters:
    """All parameters one after another, so that the optimizer takes them as one array.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        Names and shapes in order.
    xp : module
        `numpy` or `cupy`.
    dtype : numpy.dtype
        float32, or float64 to check gradients.
    rng : numpy.random.Generator
        Draws the matrices, from a normal distribution of the deviation `DEVIATION`; vectors are 1.

    Attributes
    ----------
    values, gradients : array, (parameters,)
    """

    DEVIATION = 0.05

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        xp: Any,
        dtype: np.dtype,
        rng: np.random.Generator,
    ) -> None:
        self._shapes = dict(shapes)
        self._places: dict[str, slice] = {}
        end = 0
        drawn = []
        for name, shape in self._shapes.items():
            self._places[name] = slice(end, end + prod(shape))
            end += prod(shape)
            matrix = len(shape) == 2
            drawn.append(rng.normal(0, self.DEVIATION, prod(shape)) if matrix else np.ones(shape))
        self.values = xp.asarray(np.concatenate(drawn).astype(dtype))
        self.gradients = xp.zeros_like(self.values)

    def __getitem__(self, name: str) -> Parameter:
        """Return the parameter of this name."""
        return self.stacked([name])

    def stacked(self, names: Sequence[str]) -> Parameter:
        """Return parameters that follow each other as one, stacked along the first axis."""
        places = [self._places[name] for name in names]
        for before, after in pairwise(places):
            if before.stop != after.start:
                raise ValueError(f"parameters do not follow each other: {', '.join(names)}")
        shape = self._shapes[names[0]][1:]
        whole = slice(places[0].start, places[-1].stop)
        return Parameter(
            self.values[whole].reshape(-1, *shape), self.gradients[whole].reshape(-1, *shape)
        )

    def tensors(self) -> dict[str, Array]:
        """Return all values by name, as views."""
        return {name: self[name].value for name in self._shapes}
