"""A small grid of calls that reaches every kernel, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck python scripts/sanitize.py
and the same with --tool racecheck, and with --tool initcheck --kernel-regex kns=fa: initcheck does
not see what TMA writes, and so complains about CuPy's copies of it.
"""

from __future__ import annotations

import itertools

import cupy
import ml_dtypes
import numpy as np

import cufa
from cufa.kernel import KERNELS

_DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
# Batch, heads, seq: odd. One has more tiles than blocks run at once; it and the last, many keys.
_SHAPES = (
    *((2, 4, 2, 131, 197), (1, 7, 1, 65, 40), (1, 2, 2, 3, 300)),
    *((1, 92, 23, 301, 460), (1, 2, 1, 70, 900)),
)
_HEAD_DIMS = ((8, 100), (24, 24), (59, 59), (64, 64), (128, 128), (192, 128), (256, 256))


def main() -> None:
    """Run the grid; a CUDA error ends it with an exception."""
    rng = np.random.default_rng(0)

    def random(dtype: str, *shape: int, first_rows: float = 1) -> cupy.ndarray:
        x = rng.standard_normal(shape, dtype=np.float32)
        x[..., : shape[-2] // 3, :] *= first_rows
        return cupy.asarray(x.astype(_DTYPES[dtype]))

    calls = 0
    for kernel in KERNELS.values():
        grid = itertools.product(kernel.dtypes, _HEAD_DIMS, _SHAPES, (False, True))
        for dtype, (d, dv), (b, hq, hk, sq, sk), causal in grid:
            q = random(dtype, b, sq, hq, d).swapaxes(1, 2)  # strided
            # The keys that fa3_wgmma takes last outgrow what it knows of the others.
            k = random(dtype, b, hk, sk, d, first_rows=30)
            v = random(dtype, b, hk, sk, dv)
            cufa.attention(q, k, v, causal=causal, return_lse=True, kernel=kernel.name)
            calls += 1
    cupy.cuda.get_current_stream().synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
