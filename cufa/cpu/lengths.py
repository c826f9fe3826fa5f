"""Attention on NumPy arrays of sequences that differ in length: one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import attention, numbers
from cufa.cpu.own import NO_FUNCTIONS, Own
from cufa.features.dropout import Dropout
from cufa.problem.problem import Problem


def attention_padded(
    problem: Problem,
    operands: Operands,
    lengths_k: np.ndarray | None,
    lengths_q: np.ndarray | None,
    own: Own = NO_FUNCTIONS,
) -> np.ndarray:
    """Compute attention of each sequence's first queries and keys; the result goes to `out`.

    Parameters
    ----------
    problem : Problem
        With `kv` of "Padded".
    operands : Operands
    lengths_k, lengths_q : ndarray, (batch,)
        None for all.
    own : Own
        The caller's functions.

    Returns
    -------
    ndarray
        The log-sum-exp, (batch, heads_q, seq_q) float32.
    """
    q, k, v, out, _, _ = operands
    lse = np.empty(out.shape[:3], np.float32)
    for i in range(problem.batch):
        keys = slice(None if lengths_k is None else int(lengths_k[i]))
        rows = slice(None if lengths_q is None else int(lengths_q[i]))
        one = slice(i, i + 1)
        views = q[one, :, rows], k[one, :, keys], v[one, :, keys], out[one, :, rows]
        _attend(problem, operands, one, views, lse[one, :, rows], own)
        if rows.stop is not None:
            out[one, :, rows.stop :], lse[one, :, rows.stop :] = 0, -np.inf
    return lse


def attention_varlen(
    problem: Problem,
    operands: Operands,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    seqused_k: np.ndarray | None,
    own: Own = NO_FUNCTIONS,
) -> np.ndarray:
    """Compute attention of sequences that follow each other; the result goes to `out`.

    Parameters
    ----------
    problem : Problem
        With `kv` of "Varlen".
    operands : Operands
        Their first axis has length 1.
    cu_seqlens_q, cu_seqlens_k, seqused_k : ndarray
        Where sequences begin, and how many of their keys are in use.
    own : Own
        The caller's functions.

    Returns
    -------
    ndarray
        The log-sum-exp, (1, heads_q, seq_q) float32.

    Notes
    -----
    Neighbours of equal lengths are a batch, which spreads the cost of the Python loop.
    """
    q, k, v, out, _, _ = operands
    lse = np.empty(out.shape[:3], np.float32)
    rows, keys = (np.diff(x) for x in (cu_seqlens_q, cu_seqlens_k))
    used = keys if seqused_k is None else np.minimum(keys, seqused_k)
    sizes = np.minimum(rows, problem.max_seqlen_q), np.minimum(used, problem.max_seqlen_k)
    for some in _runs(np.stack([rows, keys, *sizes])):
        n, queries, seen = some.stop - some.start, int(rows[some.start]), int(keys[some.start])
        seq_q, seq_kv = (int(x[some.start]) for x in sizes)
        at_q, at_k = int(cu_seqlens_q[some.start]), int(cu_seqlens_k[some.start])

        def of_run(x: np.ndarray, at: int, length: int, first: int, n: int = n) -> np.ndarray:
            """View the first rows of each sequence of a run as (sequences, heads, rows, ...)."""
            its = x[0, :, at : at + n * length]
            return its.reshape(len(its), n, length, *its.shape[2:]).swapaxes(0, 1)[:, :, :first]

        views = (
            of_run(q, at_q, queries, seq_q),
            of_run(k, at_k, seen, seq_kv),
            of_run(v, at_k, seen, seq_kv),
            of_run(out, at_q, queries, seq_q),
        )
        _attend(problem, operands, some, views, of_run(lse, at_q, queries, seq_q), own)
    return lse


def _runs(sizes: np.ndarray) -> Iterator[slice]:
    """Yield the columns that follow each other and are the same."""
    if sizes.size == 0:
        return
    changes = np.flatnonzero((sizes[:, 1:] != sizes[:, :-1]).any(axis=0)) + 1
    ends = [*changes.tolist(), sizes.shape[1]]
    for start, end in zip([0, *ends], ends, strict=False):
        yield slice(start, end)


def _attend(
    problem: Problem,
    operands: Operands,
    some: slice,
    views: tuple[np.ndarray, ...],
    lse: np.ndarray,
    own: Own,
) -> None:
    """Compute some sequences of equal lengths, of which there are views of q, k, v and out."""
    q, k, v, out = views
    beside = dict(operands.beside)
    if problem.of(Dropout):
        sequences = problem.sequences or problem.batch
        beside["numbers"] = numbers(sequences, problem.heads_q)
    its = {name: array if array.ndim == 1 else array[some] for name, array in beside.items()}
    one = problem._replace(batch=len(q), seq_q=q.shape[2], seq_kv=k.shape[2], kv="Dense")
    _, lse[...] = attention(
        one, Operands(q, k, v, out, its, operands.seed), own.beginning_with(some.start)
    )
