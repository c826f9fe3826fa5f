"""Gradients on NumPy arrays of sequences that differ in length: one after the other."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.backward import attention_backward, part_of
from cufa.cpu.own import NO_FUNCTIONS, Own
from cufa.cpu.runs import alone, runs
from cufa.problem.parse_backward import Gradients, Results
from cufa.problem.problem import Problem


def backward_padded(
    problem: Problem,
    operands: Operands,
    results: Results,
    into: Gradients,
    lengths_k: np.ndarray | None,
    lengths_q: np.ndarray | None,
    own: Own = NO_FUNCTIONS,
) -> None:
    """Compute the gradients of attention of each sequence's first queries and keys.

    Parameters
    ----------
    problem : Problem
        With `kv` of "Padded".
    operands, results, into
        As of `attention_backward`; gradients beyond a length are 0.
    lengths_k, lengths_q : ndarray, (batch,)
        None for all.
    own : Own
        The caller's functions.
    """
    q, k, v, out = operands[:4]
    for gradient in into[:3]:
        if gradient is not None:
            gradient[...] = 0
    for i in range(problem.batch):
        one = slice(i, i + 1)
        keys = one, slice(None), slice(None if lengths_k is None else int(lengths_k[i]))
        rows = one, slice(None), slice(None if lengths_q is None else int(lengths_q[i]))
        its_problem, its_operands = alone(
            problem, operands, one, (q[rows], k[keys], v[keys], out[rows])
        )
        its_results = Results(*(x[rows] for x in results))
        its = Gradients(
            q=None if into.q is None else into.q[rows],
            k=None if into.k is None else into.k[keys],
            v=None if into.v is None else into.v[keys],
            bias=part_of(into.bias, *rows, keys[2]),
            sinks=into.sinks,
            read=into.read,
        )
        attention_backward(its_problem, its_operands, its_results, its, own.beginning_with(i))


def backward_varlen(
    problem: Problem,
    operands: Operands,
    results: Results,
    into: Gradients,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    seqused_k: np.ndarray | None,
    own: Own = NO_FUNCTIONS,
) -> None:
    """Compute the gradients of attention of sequences that follow each other.

    Parameters
    ----------
    problem : Problem
        With `kv` of "Varlen".
    operands, results, into
        As of `attention_backward`; the first axis of all but a bias has length 1. Gradients of what
        is of no sequence, or beyond its keys in use, are 0.
    cu_seqlens_q, cu_seqlens_k, seqused_k : ndarray
        Where sequences begin, and how many of their keys are in use.
    own : Own
        The caller's functions.
    """
    q, k, v, out = operands[:4]
    for gradient in into[:3]:
        if gradient is not None:
            gradient[...] = 0
    for some, queries, keys in runs(problem, cu_seqlens_q, cu_seqlens_k, seqused_k):
        its_problem, its_operands = alone(
            problem, operands, some, (queries.of(q), keys.of(k), keys.of(v), queries.of(out))
        )
        its_results = Results(*map(queries.of, results))
        its = Gradients(
            q=None if into.q is None else queries.of(into.q),
            k=None if into.k is None else keys.of(into.k),
            v=None if into.v is None else keys.of(into.v),
            bias=part_of(into.bias, some, slice(None), slice(queries.used), slice(keys.used)),
            sinks=into.sinks,
            read=into.read,
        )
        its_own = own.beginning_with(some.start)
        attention_backward(its_problem, its_operands, its_results, its, its_own)
