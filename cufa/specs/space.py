"""Space: which instantiations of a kernel an exploration looks at unless it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cufa.specs.template_arguments import TemplateArguments


class Space(NamedTuple):
    """The default space of one kernel. Causal is the problem's, head dims are the planner's.

    Attributes
    ----------
    bm, bn, stages, warps, ping_pong : tuple
        Values of these template arguments.
    registers : callable
        The registers of a thread below which a variant is sure to spill. Compilers surprise:
        it counts what must be live at once plus what the leanest compiled variants took for the
        rest, so that mild spilling stays in the space, to be seen and timed.
    """

    bm: tuple[int, ...]
    bn: tuple[int, ...]
    stages: tuple[int, ...]
    warps: tuple[int, ...]
    registers: Callable[[TemplateArguments], float]
    ping_pong: tuple[bool, ...] = (False,)


def output(v: TemplateArguments) -> float:
    """Return how many accumulators of the output a thread holds."""
    return v.bm * v.head_dim_v / v.threads


def scores(v: TemplateArguments) -> float:
    """Return how many scores of a tile a thread holds."""
    return v.bm * v.bn / v.threads
