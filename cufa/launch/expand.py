"""Keys or values of 8 bits in a cache -> launch of ``kernels/expand8.cu``."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Array
from cufa.launch.auxiliary import prepared, table, tensor
from cufa.problem.held import Held
from cufa.quantized.rows import kind_of
from cufa.specs.expand8 import CHUNK, SPEC
from cufa.specs.instance import Instance


def expand(held: Held, out: Array) -> None:
    """Write what the first tokens of sequences stand for, on the current device and stream.

    Parameters
    ----------
    held : Held
        Rows go on in memory to whole chunks of 16 bytes.
    out : cupy.ndarray, (batch, heads_kv, length, columns)
        Columns are contiguous, and whole chunks as well.
    """
    batch, heads, seq, columns = out.shape
    if not out.size:
        return
    parameter = np.zeros(1, SPEC.params)
    p, chunks = parameter[0], columns // CHUNK
    tensors = {"values": held.values, "scales": held.scales, "mean": held.mean, "out": out}
    for name, array in tensors.items():
        p[name] = tensor(array)
    p["table"], p["table_stride"] = table(held.block_table)
    p["heads"], p["seq"], p["chunks"] = heads, seq, chunks
    p["pages"], _, p["page_size"], p["dim"] = held.values.shape
    instance = Instance(SPEC.name, (out.dtype.name,), (kind_of(held.values).is_integer,))
    blocks = batch * heads * -(-seq // (SPEC.threads // chunks))
    prepared(instance, blocks, parameter)()
