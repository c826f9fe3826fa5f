"""Attention on NumPy arrays of sequences that differ in length: one after the other."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import attention
from cufa.cpu.own import NO_FUNCTIONS, Own
from cufa.cpu.runs import alone, runs
from cufa.problem.problem import Problem


def attention_padded(
    problem: Problem, operands: Operands, lengths_k: np.ndarray, own: Own = NO_FUNCTIONS
) -> np.ndarray:
    """Compute attention over the first keys of each sequence; the result goes to `out`.

    Parameters
    ----------
    problem : Problem
        With `kv` of "Padded".
    operands : Operands
    lengths_k : ndarray, (batch,)
    own : Own
        The caller's functions.

    Returns
    -------
    ndarray
        The log-sum-exp, (batch, heads_q, seq_q) float32.
    """
    q, k, v, out, _, _ = operands
    lse = np.empty(out.shape[:3], np.float32)
    for i, length in enumerate(lengths_k.tolist()):
        one = slice(i, i + 1)
        views = q[one], k[one, :, :length], v[one, :, :length], out[one]
        _attend(problem, operands, one, views, lse[one], own)
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
