"""Decoding on NumPy arrays: sequence by sequence, each over the keys that it has."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import attend, plan
from cufa.cpu.kv import KV, Dense, Paged
from cufa.problem.parse_decode import DecodeOperands
from cufa.problem.problem import Problem


def decode(problem: Problem, operands: DecodeOperands) -> np.ndarray:
    """Compute attention over caches, as `cufa.cpu.attention.attention` does over arrays.

    Parameters
    ----------
    problem : Problem
    operands : DecodeOperands
        With `out`, where the result goes.

    Returns
    -------
    ndarray
        The log-sum-exp, (batch, heads_q, seq_q) float32.

    Notes
    -----
    No step holds keys of two sequences, so a sequence has the same bits alone and in any batch.
    """
    p, (q, k_cache, v_cache, lengths, table, out, score_arrays) = problem, operands
    call = Operands(q, k_cache, v_cache, out, score_arrays)
    lse = np.empty(out.shape[:3], np.float32)
    if lse.size == 0:
        return lse
    with np.errstate(all="ignore"):  # as in `attention`
        for i in range(p.batch):
            length = p.seq_kv if lengths is None else int(lengths[i])
            of_one = p._replace(batch=1, seq_kv=length, kv="Dense")
            one = slice(i, i + 1)

            def kv_of(heads: slice, i: int = i, one: slice = one) -> KV:
                if table is None:
                    return Dense(k_cache[one, heads], v_cache[one, heads])
                return Paged(k_cache[:, heads], v_cache[:, heads], table[i])

            attend(of_one, plan(of_one), one, call, lse, kv_of)
    return lse
