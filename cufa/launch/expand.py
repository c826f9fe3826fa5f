"""Caches of 8 bits -> launches of ``kernels/expand8.cu`` and ``kernels/lse_mean.cu``."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Array
from cufa.launch.append import in_rows
from cufa.launch.auxiliary import prepared, tensor
from cufa.problem.tokens import Held
from cufa.quantized.rows import kind_of
from cufa.specs import lse_mean
from cufa.specs.expand8 import CHUNK, SPEC
from cufa.specs.instance import Instance


def expand(held: Held, out: Array) -> None:
    """Write what the first tokens of sequences stand for, on the current device and stream.

    Parameters
    ----------
    held : Held
        Rows go on in memory to whole chunks of 16 bytes.
    out : cupy.ndarray, (batch, heads_kv, length, head_dim)
        Rows are contiguous, and go on in memory to whole chunks as well.
    """
    batch, heads, seq, dim = out.shape
    if not out.size:
        return
    parameter = np.zeros(1, SPEC.params)
    p, chunks = parameter[0], -(-dim // CHUNK)
    tensors = {"values": held.values, "scales": held.scales, "mean": held.mean, "out": out}
    for name, array in tensors.items():
        p[name] = tensor(array)
    p["table"], p["table_stride"], *_ = tensor(held.block_table)
    p["heads"], p["seq"], p["chunks"] = heads, seq, chunks
    p["pages"], _, p["page_size"], p["dim"] = held.values.shape
    instance = Instance(SPEC.name, (out.dtype.name,), (kind_of(held.values).is_integer,))
    blocks = batch * heads * -(-seq // (SPEC.threads // chunks))
    prepared(instance, blocks, parameter)()


def add_mean(lse: Array, q: Array, mean: Array, scale: float) -> None:
    """Add scale * q . mean to log-sum-exps, on the current device and stream.

    Parameters
    ----------
    lse : cupy.ndarray of float32, (batch, heads_q, seq)
        Contiguous.
    q : cupy.ndarray, (batch, heads_q, seq, head_dim)
        Any strides.
    mean : cupy.ndarray of float32, (batch, heads_kv, head_dim)
        Rows are contiguous.
    scale : float

    Raises
    ------
    ValueError
        q would be copied in a capture.
    """
    if not lse.size:
        return
    q = in_rows("q", q)
    parameter = np.zeros(1, lse_mean.SPEC.params)
    p = parameter[0]
    p["q"], p["mean"] = tensor(q), tensor(mean)
    p["lse"], p["scale"] = lse.data.ptr, scale
    _, p["heads"], p["seq"], p["head_dim"] = q.shape
    p["group"], p["rows"] = q.shape[1] // mean.shape[1], lse.size
    rows_a_block = lse_mean.SPEC.threads // 32
    instance = Instance(lse_mean.SPEC.name, (q.dtype.name,), ())
    prepared(instance, -(-lse.size // rows_a_block), parameter)()
