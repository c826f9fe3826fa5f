"""Attention on NumPy arrays of sequences that differ in length: one after the other."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import attention
from cufa.cpu.own import NO_FUNCTIONS, Own
from cufa.cpu.runs import alone, runs
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
    for some, queries, keys in runs(problem, cu_seqlens_q, cu_seqlens_k, seqused_k):
        views = queries.of(q), keys.of(k), keys.of(v), queries.of(out)
        _attend(problem, operands, some, views, queries.of(lse), own)
    return lse


def _attend(
    problem: Problem,
    operands: Operands,
    some: slice,
    views: tuple[np.ndarray, ...],
    lse: np.ndarray,
    own: Own,
) -> None:
    """Compute some sequences of equal lengths, of which there are views of q, k, v and out."""
    one, its = alone(problem, operands, some, views)
    _, lse[...] = attention(one, its, own.beginning_with(some.start))
