"""Gradients on NumPy arrays of sequences that differ in length: one after the other."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.backward import attention_backward, part_of
from cufa.cpu.own import NO_FUNCTIONS, Own
from cufa.cpu.runs import alone, runs
from cufa.problem.parse_backward import Gradients, Results
from cufa.problem.problem import Problem

_ALL = slice(None), slice(None)  # heads and queries


def backward_padded(
    problem: Problem,
    operands: Operands,
    results: Results,
    into: Gradients,
    lengths_k: np.ndarray,
    own: Own = NO_FUNCTIONS,
) -> None:
    """Compute the gradients of attention over the first keys of each sequence.

    Parameters
    ----------
    problem : Problem
        With `kv` of "Padded".
    operands, results, into
        As of `attention_backward`; gradients of keys beyond a length are 0.
    lengths_k : ndarray, (batch,)
    own : Own
        The caller's functions.
    """
    q, k, v, out = operands[:4]
    for gradient in (into.k, into.v):
        if gradient is not None:
            gradient[...] = 0
    for i, length in enumerate(lengths_k.tolist()):
        one = slice(i, i + 1)
        its_problem, its_operands = alone(
            problem, operands, one, (q[one], k[one, :, :length], v[one, :, :length], out[one])
        )
        its_results = Results(*(x[one] for x in results))
        its = Gradients(
            q=None if into.q is None else into.q[one],
            k=None if into.k is None else into.k[one, :, :length],
            v=None if into.v is None else into.v[one, :, :length],
            bias=part_of(into.bias, one, *_ALL, slice(length)),
            sinks=into.sinks,
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
        )
        its_own = own.beginning_with(some.start)
        attention_backward(its_problem, its_operands, its_results, its, its_own)
