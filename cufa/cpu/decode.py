"""Decoding on NumPy arrays: sequence by sequence, each over the keys that it has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cufa.arrays import Operands
from cufa.cpu.attention import attend, plan
from cufa.cpu.kv import KV, Dense, Paged, Scaled
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
    of_scales = tuple(scale[..., None] for scale in operands.scales)
    lse = np.empty(operands.out.shape[:3], np.float32)
    if lse.size == 0:
        return lse
    with np.errstate(all="ignore"):  # as in `attention`
        for i in range(p.batch):
            length = p.seq_kv if lengths is None else int(lengths[i])
            of_one = p._replace(batch=1, seq_kv=length, kv="Dense")
            one = slice(i, i + 1)

            def found(
                k: np.ndarray, v: np.ndarray, heads: slice, i: int = i, one: slice = one
            ) -> KV:
                if table is None:
                    return Dense(k[one, heads], v[one, heads])
                return Paged(k[:, heads], v[:, heads], table[i])

            def kv_of(heads: slice, found: Callable[..., KV] = found) -> KV:
                values = found(k_cache, v_cache, heads)
                return Scaled(values, found(*of_scales, heads)) if of_scales else values

            attend(of_one, plan(of_one), one, operands, lse, kv_of)
    return lse
