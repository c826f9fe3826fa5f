"""One process of the jit benchmark: time the first ``cufa.attention`` of a new process.

Run as ``python -m benchmarks.first_call DTYPE HEAD_DIM CAUSAL KERNEL``, with CAUSAL 0 or 1 and
KERNEL a name or ``auto``. Prints the seconds as its last line.
"""

from __future__ import annotations

import sys
import time

import cupy
import numpy as np

import cufa
from benchmarks.inputs import DTYPES

HEADS = 8
SEQ = 512


def main(dtype: str, head_dim: int, causal: bool, kernel: str | None) -> float:
    """Return the seconds from the call to its result, beyond imports and context creation."""
    rng = np.random.default_rng(0)
    # Filled on the host: no kernel of CuPy's own is compiled here, nor in the timed part.
    q, k, v = (
        cupy.asarray(rng.standard_normal((1, HEADS, SEQ, head_dim)).astype(DTYPES[dtype]))
        for _ in "qkv"
    )
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    out = cufa.attention(q, k, v, causal=causal, kernel=kernel)
    cupy.cuda.Device().synchronize()
    seconds = time.perf_counter() - start
    if not np.isfinite(cupy.asnumpy(out).astype(np.float32)).all():
        raise SystemExit("the result is not finite")
    return seconds


if __name__ == "__main__":
    dtype, head_dim, causal, kernel = sys.argv[1:]
    print(main(dtype, int(head_dim), causal == "1", None if kernel == "auto" else kernel))
