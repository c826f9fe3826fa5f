"""Sequences of unequal lengths: runs of equal ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from cufa.arrays import Array, Operands
from cufa.problem.problem import Problem


class Run(NamedTuple):
    """Neighbours of equal lengths, which are a call of their own.

    Attributes
    ----------
    some : slice
        Which sequences.
    seq_q, seq_kv : int
        Queries and keys of each.
    queries, keys : callable
        View an array of all sequences, in the order of q, or of k and v, as (batch, heads, seq,
        ...) of these; keys in pages as (1, heads, pages, page_size, ...), with all pages.
    table : ndarray or None
        The pages of the one sequence, in order.
    """

    some: slice
    seq_q: int
    seq_kv: int
    queries: Callable[[np.ndarray], np.ndarray]
    keys: Callable[[np.ndarray], np.ndarray]
    table: np.ndarray | None = None


def runs(problem: Problem, operands: Operands) -> Iterator[Run]:
    """Yield the runs of a call, in order.

    Neighbours of equal lengths that follow each other are one, which spreads the cost of the Python
    loop. In a cache each sequence is one, so that it has the same bits alone and in any batch.
    """
    lengths = operands.lengths
    if problem.kv == "Varlen":
        yield from _that_follow(problem, **lengths)
        return
    used_q, used_k = lengths.get("lengths_q"), lengths.get("lengths_k", lengths.get("lengths"))
    table = lengths.get("block_table")
    step = problem.batch if problem.kv == "Dense" else 1
    for i in range(0, problem.batch, step or 1):
        some = slice(i, i + step)
        seq_q = problem.seq_q if used_q is None else int(used_q[i])
        seq_kv = problem.seq_kv if used_k is None else int(used_k[i])
        queries = partial(_padded, some, seq_q)
        if table is None:
            yield Run(some, seq_q, seq_kv, queries, partial(_padded, some, seq_kv))
        else:
            yield Run(some, seq_q, seq_kv, queries, _in_pages, table[i])


def _that_follow(
    problem: Problem, cu_seqlens_q: Array, cu_seqlens_k: Array, seqused_k: Array | None
) -> Iterator[Run]:
    rows, keys = (np.diff(x) for x in (cu_seqlens_q, cu_seqlens_k))
    used = keys if seqused_k is None else np.minimum(keys, seqused_k)
    counted = np.minimum(rows, problem.max_seqlen_q), np.minimum(used, problem.max_seqlen_k)
    end = 0
    for sizes, same in groupby(np.stack([rows, keys, *counted], axis=1).tolist()):
        length_q, length_k, seq_q, seq_kv = sizes
        start, n = end, len(list(same))
        end += n
        queries = partial(_packed, int(cu_seqlens_q[start]), n, length_q, seq_q)
        keys_of = partial(_packed, int(cu_seqlens_k[start]), n, length_k, seq_kv)
        yield Run(slice(start, end), seq_q, seq_kv, queries, keys_of)


def _padded(some: slice, used: int, x: np.ndarray) -> np.ndarray:
    """View the first rows of some sequences in arrays where each has as many."""
    return x[some, :, :used]


def _in_pages(x: np.ndarray) -> np.ndarray:
    """View (pages, heads, page_size, ...) as (1, heads, pages, page_size, ...)."""
    return x.swapaxes(0, 1)[None]


def _packed(first: int, sequences: int, length: int, used: int, x: np.ndarray) -> np.ndarray:
    """View (1, heads, rows, ...), where sequences follow each other, as (sequences, heads, ...).

    The first of them begins at row `first`; each has `length` rows, of which the first `used` ones
    count.
    """
    rows = x[0, :, first : first + sequences * length]
    by_sequence = rows.reshape(len(rows), sequences, length, *rows.shape[2:])
    return by_sequence.swapaxes(0, 1)[:, :, :used]
