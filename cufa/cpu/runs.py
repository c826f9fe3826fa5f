"""Sequences of unequal lengths: runs of equal ones, each of which is a call of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from cufa.arrays import Array, Operands
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
        rows = x[0, :, self.first : self.first + self.sequences * self.length]
        by_sequence = rows.reshape(len(rows), self.sequences, self.length, *rows.shape[2:])
        return by_sequence.swapaxes(0, 1)[:, :, : self.used]


class PaddedRows(NamedTuple):
    """The rows of a sequence in arrays where each has as many; the first `used` ones count."""

    sequence: slice
    used: int | None

    def of(self, x: np.ndarray) -> np.ndarray:
        """View (sequences, heads, rows, ...) as (1, heads, used, ...)."""
        return x[self.sequence, :, : self.used]


class Run(NamedTuple):
    """Neighbours of equal lengths.

    Attributes
    ----------
    some : slice
        Which sequences.
    queries, keys : Rows or PaddedRows
    """

    some: slice
    queries: Rows | PaddedRows
    keys: Rows | PaddedRows

    def call(self, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
        """Return the call of these sequences, from the problem and the operands of all."""
        q, out = (self.queries.of(x) for x in (operands.q, operands.out))
        k, v = (self.keys.of(x) for x in (operands.k, operands.v))
        score_arrays = dict(operands.score_arrays)
        if problem.of(Dropout):
            score_arrays["numbers"] = numbers(problem.sequences or problem.batch, problem.heads_q)
        of_run = {name: x if x.ndim == 1 else x[self.some] for name, x in score_arrays.items()}
        one = problem._replace(batch=len(q), seq_q=q.shape[2], seq_kv=k.shape[2], kv="Dense")
        return one, Operands(q, k, v, out, of_run, operands.seed)


def runs(problem: Problem, lengths: Mapping[str, Array | None]) -> Iterator[Run]:
    """Yield the runs of a call, in order.

    Neighbours of equal lengths that follow each other are one, which spreads the cost of the Python
    loop.

    Parameters
    ----------
    problem : Problem
        With `kv` "Padded" or "Varlen".
    lengths : mapping
        By argument: ``lengths_k`` and ``lengths_q``; or ``cu_seqlens_q``, ``cu_seqlens_k`` and
        ``seqused_k``. None for one that is not given.
    """
    if problem.kv == "Varlen":
        yield from _that_follow(problem, **lengths)
        return
    for i in range(problem.batch):
        one = slice(i, i + 1)
        queries, keys = (
            PaddedRows(one, None if used is None else int(used[i]))
            for used in (lengths["lengths_q"], lengths["lengths_k"])
        )
        yield Run(one, queries, keys)


def _that_follow(
    problem: Problem, cu_seqlens_q: Array, cu_seqlens_k: Array, seqused_k: Array | None
) -> Iterator[Run]:
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
