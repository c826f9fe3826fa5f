"""Classes of problems: those that one tile serves, the keys of the tuned tables."""

from __future__ import annotations

from typing import NamedTuple

from cufa.device import Device
from cufa.dtypes import DTYPES
from cufa.problem.problem import Problem
from cufa.specs import default_kernel

_TILE = 128  # rows, or keys, of the tiles that `ProblemClass.waves` counts
_SEQ_RANGE = (64, 16384)


class ProblemClass(NamedTuple):
    """Problems that one tile serves.

    Attributes
    ----------
    element_bytes : int
    head_dim, head_dim_v : int
        As compiled in the default kernel, or in the first kernel of the gradients.
    score : tuple of str
    seq_q, seq_kv : int
        A power of two, the problem's or the next; with a window, the most keys that a query sees.
    waves : int
        Tiles a multiprocessor, of rows or, for gradients, of keys: 0 up to a half, 1, 2, 4 up to
        that many, 8 for more.
    backward : bool
        Whether the tile is for the gradients by q, k and v.
    """

    element_bytes: int
    head_dim: int
    head_dim_v: int
    score: tuple[str, ...]
    seq_q: int
    seq_kv: int
    waves: int
    backward: bool = False


def _seq_class(length: int) -> int:
    low, high = _SEQ_RANGE
    return min(max(1 << max(0, length - 1).bit_length(), low), high)


def problem_class(problem: Problem, device: Device) -> ProblemClass:
    """Return the class of a problem on a device.

    Parameters
    ----------
    problem : Problem
    device : Device
    """
    kernel = default_kernel(problem.dtype, device)
    head_dims = kernel.padded(device, problem.head_dim, problem.head_dim_v)
    tiles = problem.batch * problem.heads_q * -(-problem.seq_q // _TILE)
    return _class_of(problem, device, head_dims, tiles)


def gradient_class(problem: Problem, device: Device, head_dims: tuple[int, int]) -> ProblemClass:
    """Return the class of the gradients of a problem on a device.

    That of sequences of other lengths is that of as many sequences of the mean length.

    Parameters
    ----------
    problem : Problem
        As the kernels see it: with the log-sum-exp, and without sinks.
    device : Device
    head_dims : tuple of int
        As compiled.
    """
    problem = problem.alike
    tiles = problem.batch * problem.heads_kv * -(-problem.seq_kv // _TILE)
    return _class_of(problem, device, head_dims, tiles)._replace(backward=True)


def _class_of(
    problem: Problem, device: Device, head_dims: tuple[int, int], tiles: int
) -> ProblemClass:
    waves = next((n for n in (1, 2, 4) if tiles <= n * device.sm_count), 8)
    return ProblemClass(
        DTYPES[problem.dtype].bytes,
        *head_dims,
        problem.score,
        _seq_class(problem.seq_q),
        _seq_class(min(problem.seq_kv, problem.most_seen or problem.seq_kv)),
        0 if 2 * tiles <= device.sm_count else waves,
    )
