"""One process of the jit benchmark: time the first ``cufa.attention`` of a new process.

Run as ``python -m benchmarks.first_call DTYPE HEAD_DIM CAUSAL KERNEL [FEATURE]``, with CAUSAL 0 or
1, KERNEL a name or ``auto``, and FEATURE one of the table of masks, which has a shape of its own.
Prints the seconds as its last line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

import cufa
from benchmarks.inputs import DTYPES

HEADS = 8
SEQ = 512


def of_feature(feature: str, head_dim: int) -> float:
    """Return the seconds of a call with a feature; its arrays are there before."""
    from benchmarks import masks
    from benchmarks.inputs import Operands

    found = (c for c in masks.cases() if (c.feature, c.cell.d) == (feature, head_dim))
    case, rng = next(found), cupy.random.default_rng(0)
    call, _ = case.call(Operands(case.cell, rng), rng, cufa)
    return seconds_of(call)


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds from a call to its result."""
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    out = call()
    cupy.cuda.Device().synchronize()
    seconds = time.perf_counter() - start
    # A few rows: nothing of CuPy's own need be compiled for them.
    if not np.isfinite(cupy.asnumpy(out[:1, :1]).astype(np.float32)).all():
        raise SystemExit("the result is not finite")
    return seconds


def main(dtype: str, head_dim: int, causal: bool, kernel: str | None) -> float:
    """Return the seconds from the call to its result, beyond imports and context creation."""
    rng = np.random.default_rng(0)
    # Filled on the host: no kernel of CuPy's own is compiled here, nor in the timed part.
    q, k, v = (
        cupy.asarray(rng.standard_normal((1, HEADS, SEQ, head_dim)).astype(DTYPES[dtype]))
        for _ in "qkv"
    )
    return seconds_of(lambda: cufa.attention(q, k, v, causal=causal, kernel=kernel))


if __name__ == "__main__":
    dtype, head_dim, causal, kernel, *features = sys.argv[1:]
    if features:
        print(of_feature(features[0], int(head_dim)))
    else:
        print(main(dtype, int(head_dim), causal == "1", None if kernel == "auto" else kernel))
