"""Runs of sequences of equal lengths, which are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import numbers
from cufa.features.dropout import Dropout
from cufa.problem.problem import Problem


class Rows(NamedTuple):
    """The rows of a run in arrays where sequences follow each other.

    Attributes
    ----------
    first : int
        Where the first sequence begins.
    sequences, length : int
        How many there are, and rows of each.
    used : int
        How many of these count, the first ones.
    """

    first: int
    sequences: int
    length: int
    used: int

    def of(self, x: np.ndarray) -> np.ndarray:
        """View (1, heads, rows, ...) as (sequences, heads, used, ...)."""
        its = x[0, :, self.first : self.first + self.sequences * self.length]
        by_sequence = its.reshape(len(its), self.sequences, self.length, *its.shape[2:])
        return by_sequence.swapaxes(0, 1)[:, :, : self.used]


class Run(NamedTuple):
    """Neighbours of equal lengths.

    Attributes
    ----------
    some : slice
        Which sequences.
    queries, keys : Rows
    """

    some: slice
    queries: Rows
    keys: Rows


def runs(
    problem: Problem,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    seqused_k: np.ndarray | None,
) -> Iterator[Run]:
    """Yield the runs of a call of `attention_varlen`, in order.

    Parameters
    ----------
    problem : Problem
        With `kv` of "Varlen".
    cu_seqlens_q, cu_seqlens_k, seqused_k : ndarray
        Where sequences begin, and how many of their keys are in use.
    """
    rows, keys = (np.diff(x) for x in (cu_seqlens_q, cu_seqlens_k))
    if rows.size == 0:
        return
    used = keys if seqused_k is None else np.minimum(keys, seqused_k)
    sizes = np.stack(
        [rows, keys, np.minimum(rows, problem.max_seqlen_q), np.minimum(used, problem.max_seqlen_k)]
    )
    if sizes.size == 0:
        return
    changes = np.flatnonzero((sizes[:, 1:] != sizes[:, :-1]).any(axis=0)) + 1
    ends = [*changes.tolist(), sizes.shape[1]]
    for start, end in zip([0, *ends], ends, strict=False):
        n, (length_q, length_k, seq_q, seq_kv) = end - start, sizes[:, start].tolist()
        yield Run(
            slice(start, end),
            Rows(int(cu_seqlens_q[start]), n, length_q, seq_q),
            Rows(int(cu_seqlens_k[start]), n, length_k, seq_kv),
        )


def alone(
    problem: Problem, operands: Operands, some: slice, views: tuple[np.ndarray, ...]
) -> tuple[Problem, Operands]:
    """Return the call that some sequences of equal lengths are.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        The operands of all sequences.
    some : slice
        Which ones.
    views : tuple of ndarray
        Their q, k, v and out.
    """
    q, k, v, out = views
    beside = dict(operands.beside)
    if problem.of(Dropout):
        beside["numbers"] = numbers(problem.sequences or problem.batch, problem.heads_q)
    its = {name: array if array.ndim == 1 else array[some] for name, array in beside.items()}
    one = problem._replace(batch=len(q), seq_q=q.shape[2], seq_kv=k.shape[2], kv="Dense")
    return one, Operands(q, k, v, out, its, operands.seed)
