"""Attention, and its gradients, on NumPy arrays of sequences that differ in length, one by one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cufa.arrays import Array, Operands
from cufa.cpu.attention import attention
from cufa.cpu.backward import attention_backward, part_of
from cufa.cpu.functions import Functions
from cufa.cpu.runs import runs
from cufa.problem.parse_backward import Gradients, Results
from cufa.problem.problem import Problem


def attention_of_lengths(
    problem: Problem,
    operands: Operands,
    lengths: Mapping[str, Array | None],
    functions: Functions,
) -> np.ndarray:
    """Compute attention of each sequence's queries and keys; the result goes to `out`.

    Parameters
    ----------
    problem, lengths
        As in `cufa.cpu.runs.runs`.
    operands : Operands
        For "Varlen", their first axis has length 1.
    functions : Functions
        The caller's functions.

    Returns
    -------
    ndarray
        The log-sum-exp, (batch, heads_q, seq_q) float32.
    """
    lse = np.empty(operands.out.shape[:3], np.float32)
    if lengths.get("lengths_q") is not None:  # which leave rows out
        operands.out[...], lse[...] = 0, -np.inf
    for run in runs(problem, lengths):
        _, of_run = attention(
            *run.call(problem, operands), functions.beginning_with(run.some.start)
        )
        run.queries.of(lse)[...] = of_run
    return lse


def backward_of_lengths(
    problem: Problem,
    operands: Operands,
    results: Results,
    into: Gradients,
    lengths: Mapping[str, Array | None],
    functions: Functions,
) -> None:
    """Compute the gradients of attention of each sequence's queries and keys.

    Parameters
    ----------
    problem, lengths
        As in `cufa.cpu.runs.runs`.
    operands, results, into
        As in `attention_backward`; for "Varlen", the first axis of all but a bias has length 1.
        Gradients of rows that no sequence has, or beyond a length, are 0.
    functions : Functions
        The caller's functions.
    """
    for gradient in into[:3]:
        if gradient is not None:
            gradient[...] = 0
    for run in runs(problem, lengths):
        queries, keys = run.queries, run.keys
        of_run = into._replace(
            q=None if into.q is None else queries.of(into.q),
            k=None if into.k is None else keys.of(into.k),
            v=None if into.v is None else keys.of(into.v),
            bias=part_of(into.bias, run.some, slice(None), slice(queries.used), slice(keys.used)),
        )
        one, of_call = run.call(problem, operands)
        given = Results(*map(queries.of, results))
        attention_backward(one, of_call, given, of_run, functions.beginning_with(run.some.start))
