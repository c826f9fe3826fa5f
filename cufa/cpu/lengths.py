"""Attention on NumPy arrays of sequences that differ in length: one after the other."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import attention, numbers
from cufa.problem import Problem


def attention_padded(problem: Problem, operands: Operands, lengths_k: np.ndarray) -> np.ndarray:
    """Compute attention over the first keys of each sequence; the result goes to `out`.

    Parameters
    ----------
    problem : Problem
        With `kv` of "Padded".
    operands : Operands
    lengths_k : ndarray, (batch,)

    Returns
    -------
    ndarray
        The log-sum-exp, (batch, heads_q, seq_q) float32.
    """
    lse = np.empty(operands.out.shape[:3], np.float32)
    rows = slice(0, problem.seq_q)
    for i, length in enumerate(lengths_k):
        one = slice(i, i + 1)
        _attend(problem, operands, i, (one, rows), (one, slice(0, int(length))), lse)
    return lse


def attention_varlen(
    problem: Problem,
    operands: Operands,
    cu_seqlens_q: np.ndarray,
    cu_seqlens_k: np.ndarray,
    seqused_k: np.ndarray | None,
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

    Returns
    -------
    ndarray
        The log-sum-exp, (1, heads_q, seq_q) float32.
    """
    lse = np.empty(operands.out.shape[:3], np.float32)
    all_of_it = slice(None)
    for i in range(problem.sequences):
        q0, q1, k0, k1 = (int(x[j]) for x in (cu_seqlens_q, cu_seqlens_k) for j in (i, i + 1))
        q1, k1 = min(q1, q0 + problem.max_seqlen_q), min(k1, k0 + problem.max_seqlen_k)
        if seqused_k is not None:
            k1 = min(k1, k0 + int(seqused_k[i]))
        _attend(problem, operands, i, (all_of_it, slice(q0, q1)), (all_of_it, slice(k0, k1)), lse)
    return lse


def _attend(
    problem: Problem,
    operands: Operands,
    number: int,
    queries: tuple[slice, slice],
    keys: tuple[slice, slice],
    lse: np.ndarray,
) -> None:
    """Compute a sequence, which has this number; its queries and keys lie where the slices say."""
    q, k, v, out, beside, seed = operands
    if problem.dropout_p:
        sequences = problem.sequences or problem.batch
        beside = {**beside, "numbers": numbers(sequences, problem.heads_q)}
    at_q, at_k = (queries[0], slice(None), queries[1]), (keys[0], slice(None), keys[1])
    seq_q, seq_kv = queries[1].stop - queries[1].start, keys[1].stop - keys[1].start
    one = problem._replace(batch=1, seq_q=seq_q, seq_kv=seq_kv, kv="Dense")
    its = {
        name: array if array.ndim == 1 else array[number : number + 1]
        for name, array in beside.items()
    }
    _, lse[at_q] = attention(one, Operands(q[at_q], k[at_k], v[at_k], out[at_q], its, seed))
