"""Arrays -> launch of ``kernels/lse_mean.cu``."""

from __future__ import annotations

import numpy as np

from cufa.arrays import Array
from cufa.launch.append import in_rows
from cufa.launch.auxiliary import prepared, tensor
from cufa.specs.instance import Instance
from cufa.specs.lse_mean import SPEC


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
    parameter = np.zeros(1, SPEC.params)
    p = parameter[0]
    p["q"], p["mean"] = tensor(q), tensor(mean)
    p["lse"], p["scale"] = lse.data.ptr, scale
    _, p["heads"], p["seq"], p["head_dim"] = q.shape
    p["group"], p["rows"] = q.shape[1] // mean.shape[1], lse.size
    rows_a_block = SPEC.threads // 32
    instance = Instance(SPEC.name, (q.dtype.name,), ())
    prepared(instance, -(-lse.size // rows_a_block), parameter)()
