"""Attention on NumPy arrays of sequences that differ in length: one after the other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cufa.arrays import Array, Operands
from cufa.cpu.attention import attention
from cufa.cpu.functions import Functions
from cufa.cpu.runs import runs
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
