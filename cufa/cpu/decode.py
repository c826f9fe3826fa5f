"""Decoding on NumPy arrays: sequence by sequence, each over the keys that it has."""

from __future__ import annotations

import numpy as np

from cufa.cpu.attention import of_heads, plan
from cufa.cpu.kv import KV, Dense, Paged
from cufa.cpu.query_tile import query_tile
from cufa.cpu.spans import spans
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
    p, (q, k_cache, v_cache, lengths, table, out, beside) = problem, operands
    lse = np.empty(out.shape[:3], np.float32)
    if lse.size == 0:
        return lse
    with np.errstate(all="ignore"):  # as in `attention`
        for i in range(p.batch):
            length = p.seq_kv if lengths is None else int(lengths[i])
            of_one = p._replace(batch=1, seq_kv=length, kv="Dense")
            step = plan(of_one)
            one = slice(i, i + 1)
            for heads_kv in spans(0, p.heads_kv, step.heads_kv):
                heads = slice(heads_kv.start * p.group, heads_kv.stop * p.group)
                kv: KV
                if table is None:
                    kv = Dense(k_cache[one, heads_kv], v_cache[one, heads_kv])
                else:
                    kv = Paged(k_cache[:, heads_kv], v_cache[:, heads_kv], table[i])
                for rows in spans(0, p.seq_q, step.rows):
                    query_tile(
                        of_one,
                        rows,
                        step.keys,
                        q[one, heads, rows],
                        kv,
                        out[one, heads, rows],
                        lse[one, heads, rows],
                        of_heads(beside, one, heads),
                    )
    return lse
