"""Decoding on NumPy arrays: sequence by sequence, each over the keys that it has."""

from __future__ import annotations

from functools import partial

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import attend, steps_of
from cufa.cpu.functions import NO_FUNCTIONS
from cufa.cpu.kv import KV
from cufa.cpu.runs import Run, padded
from cufa.problem.problem import Problem
from cufa.quantized.e4m3 import E4M3


def decode(problem: Problem, operands: Operands) -> np.ndarray:
    """Compute attention over caches, as `cufa.cpu.attention.attention` does over arrays.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        With `out`, where the result goes. K and V are caches.

    Returns
    -------
    ndarray
        The log-sum-exp, (batch, heads_q, seq_q) float32.

    Notes
    -----
    No step holds keys of two sequences, so a sequence has the same bits alone and in any batch.
    """
    p, k_cache, v_cache = problem, operands.k, operands.v
    lengths, table = operands.lengths.values()
    if p.kv_dtype == E4M3.name:
        k_cache, v_cache = k_cache.view(E4M3), v_cache.view(E4M3)  # of uint8
    caches = k_cache, v_cache, *(scale[..., None] for scale in operands.scales)
    lse = np.empty(operands.out.shape[:3], np.float32)
    with np.errstate(all="ignore"):  # as in `attention`
        for i in range(p.batch):
            one = slice(i, i + 1)
            length = p.seq_kv if lengths is None else int(lengths[i])
            of_one = p._replace(batch=1, seq_kv=length, kv="Dense")
            run = Run(one, *2 * [partial(padded, one, None)])
            blocks, pages = (one, None) if table is None else (slice(None), table[i])
            for step in steps_of(of_one, run, operands, NO_FUNCTIONS):
                kv = KV(*(x[blocks, step.heads_kv] for x in caches), table=pages)
                attend(step, operands, kv, lse)
    return lse
