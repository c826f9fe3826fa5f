"""Sequences of unequal lengths: runs of equal ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from cufa.arrays import Array
from cufa.problem.problem import Problem


class Run(NamedTuple):
    """Neighbours of equal lengths, which are a call of their own.

    Attributes
    ----------
    some : slice
        Which sequences.
    queries, keys : callable
        View an array of all sequences, in the order of q, or of k and v, as (batch, heads, seq,
        ...) of these.
    """

    some: slice
    queries: Callable[[np.ndarray], np.ndarray]
    keys: Callable[[np.ndarray], np.ndarray]


def runs(problem: Problem, lengths: Mapping[str, Array | None]) -> Iterator[Run]:
    """Yield the runs of a call, in order.

    Neighbours of equal lengths that follow each other are one, which spreads the cost of the Python
    loop.

    Parameters
    ----------
    problem : Problem
        With `kv` "Dense", "Padded" or "Varlen".
    lengths : mapping
        By argument: none for "Dense"; ``lengths_k`` and ``lengths_q``; or ``cu_seqlens_q``,
        ``cu_seqlens_k`` and ``seqused_k``. None for one that is not given.
    """
    if problem.kv == "Varlen":
        yield from _that_follow(problem, **lengths)
    elif problem.kv == "Dense":
        everything = slice(0, problem.batch)
        yield Run(everything, *2 * [partial(padded, everything, None)])
    else:
        for i in range(problem.batch):
            one = slice(i, i + 1)
            queries, keys = (
                partial(padded, one, None if used is None else int(used[i]))
                for used in (lengths["lengths_q"], lengths["lengths_k"])
            )
            yield Run(one, queries, keys)


def _that_follow(
    problem: Problem, cu_seqlens_q: Array, cu_seqlens_k: Array, seqused_k: Array | None
) -> Iterator[Run]:
    rows, keys = (np.diff(x) for x in (cu_seqlens_q, cu_seqlens_k))
    used = keys if seqused_k is None else np.minimum(keys, seqused_k)
    sizes = np.stack(
        [rows, keys, np.minimum(rows, problem.max_seqlen_q), np.minimum(used, problem.max_seqlen_k)]
    )
    changes = np.flatnonzero((sizes[:, 1:] != sizes[:, :-1]).any(axis=0)) + 1
    starts = [0, *changes.tolist()] if rows.size else []
    for start, end in zip(starts, [*starts[1:], rows.size], strict=False):
        n, (length_q, length_k, seq_q, seq_kv) = end - start, sizes[:, start].tolist()
        yield Run(
            slice(start, end),
            partial(_packed, int(cu_seqlens_q[start]), n, length_q, seq_q),
            partial(_packed, int(cu_seqlens_k[start]), n, length_k, seq_kv),
        )


def padded(some: slice, used: int | None, x: np.ndarray) -> np.ndarray:
    """View the first rows of some sequences in arrays where each has as many."""
    return x[some, :, :used]


def _packed(first: int, sequences: int, length: int, used: int, x: np.ndarray) -> np.ndarray:
    """View (1, heads, rows, ...), where sequences follow each other, as (sequences, heads, ...).

    The first of them begins at row `first`; each has `length` rows, of which the first `used` ones
    count.
    """
    rows = x[0, :, first : first + sequences * length]
    by_sequence = rows.reshape(len(rows), sequences, length, *rows.shape[2:])
    return by_sequence.swapaxes(0, 1)[:, :, :used]
