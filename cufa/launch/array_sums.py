"""Arrays -> the gradients that are wanted of them, and launches that make these from sums."""

from __future__ import annotations

import math

import numpy as np

from cufa.dtypes import DTYPES
from cufa.features.parts import part_named
from cufa.launch.auxiliary import prepared
from cufa.launch.launch import Launch
from cufa.planner.array_sums import ArraySums, Wanted
from cufa.problem.extras import steps
from cufa.problem.parse_backward import Gradients
from cufa.problem.problem import Problem
from cufa.specs.bwd_sums import SPEC
from cufa.specs.instance import Instance

_WARP = 32


def wanted_of(problem: Problem, gradients: Gradients, ndim: int) -> tuple[Wanted, ...]:
    """Return what is wanted next to gradients of q, k, v and sinks.

    Parameters
    ----------
    problem : Problem
    gradients : Gradients
        The gradient of a bias has the axes of the caller's.
    ndim : int
        Axes of the caller's q.
    """
    parts = {part_named(name).argument: name for name in problem.score}
    found = []
    if gradients.bias is not None:
        name, sizes, bias = parts["bias"], problem.sizes, gradients.bias
        has = steps(part_named(name), ndim, sizes, bias.shape, (1,) * len(bias.shape))
        assert has is not None
        lengths = tuple(n if x else 1 for n, x in zip(sizes.values(), has, strict=True))
        found.append(Wanted(name, bias.dtype.name, lengths))
    found += (
        Wanted(parts["score_mod"], array.dtype.name, tuple(array.shape))
        for array in gradients.read.values()
    )
    return tuple(found)


def finishing(sums: ArraySums, which: int) -> Launch | None:
    """Return the launch, on the current device, that makes a gradient of its sums.

    Parameters
    ----------
    sums : ArraySums
    which : int
        The number of the address of the sums; the address of the gradient is the next one.

    Returns
    -------
    callable or None
        None if the sums are the gradient, or of a dtype that no kernel writes.
    """
    if sums.place < 0 or sums.dtype not in DTYPES:
        return None
    elements = math.prod(sums.lengths)
    lanes = _WARP if sums.size >= _WARP * elements else 1
    instance = Instance(SPEC.name, (sums.dtype,), (), is_dependent=False)
    parameter = np.zeros(1, SPEC.params)
    parameter[0] = 0, 0, elements, *sums.lengths, *sums.sums, lanes
    blocks = -(-elements * lanes // SPEC.threads)
    return prepared(instance, blocks, parameter, ((0, which), (1, which + 1)))
