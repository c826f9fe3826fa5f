"""Keys or values of 8 bits in a cache -> launch of ``kernels/expand8.cu``."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Array
from cufa.launch.launch import PreparedLaunch, ready
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
    for name, array in (("values", held.values), ("scales", held.scales), ("out", out)):
        p[name] = (array.data.ptr, *(step // array.itemsize for step in array.strides[:3]))
    if held.block_table is not None:
        table = held.block_table
        p["table"], p["table_stride"] = table.data.ptr, table.strides[0] // table.itemsize
    if held.mean is not None:
        steps = (step // held.mean.itemsize for step in held.mean.strides[:2])
        p["mean"] = (held.mean.data.ptr, *steps, 0)
    p["heads"], p["seq"], p["chunks"] = heads, seq, chunks
    p["pages"], _, p["page_size"], p["dim"] = held.values.shape
    types = (out.dtype.name,)
    instance = Instance(SPEC.name, types, (kind_of(held.values).is_integer,))
    blocks = batch * heads * -(-seq // (SPEC.threads // chunks))
    PreparedLaunch(ready(instance, blocks, SPEC.threads), parameter)()
