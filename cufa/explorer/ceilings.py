"""The most that the card can do: memory and matrix ceilings, measured with the contestants."""

from __future__ import annotations

import contextlib
import statistics

import numpy as np

from cufa.explorer.clock import Call, Clock
from cufa.features.random_arrays import normal

_READ_SOURCE = r"""
extern "C" __global__ void read_only(const float4* __restrict__ x, long long n, float* out) {
    const long long step = (long long)gridDim.x * blockDim.x;
    float sum = 0.f;
    #pragma unroll 8
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const float4 a = __ldg(x + i);
        sum += a.x + a.y + a.z + a.w;
    }
    // Never true for finite sums; without it the loads would be removed.
    if (sum == __int_as_float(0x7f800000)) out[0] = sum;
}
"""

_SAMPLES = 9
_MEMORY_BYTES = 4 << 30  # read or copied at once, on a card that has room for it


def measure(clock: Clock, dtype: str) -> dict[str, float]:
    """Return ``read_gbs``, ``copy_gbs`` and, where cuBLAS is installed, ``gemm_tflops``.

    Bandwidths are in GB/s; a copy counts the bytes read and the bytes written. The product, of
    `dtype`, is 8192 x 8192 x 8192 through cuBLAS; float32 is not computed in TF32. Data are random,
    as some products run faster on zeros.
    """
    import cupy

    read_gbs, copy_gbs = _memory_gbs(clock)
    ceilings = {"read_gbs": round(read_gbs, 1), "copy_gbs": round(copy_gbs, 1)}
    # There may be no cuBLAS, or no room for the matrices.
    with contextlib.suppress(ImportError, OSError, RuntimeError, MemoryError):
        ceilings["gemm_tflops"] = round(_gemm_tflops(clock, dtype), 1)
    cupy.get_default_memory_pool().free_all_blocks()
    return ceilings


def _memory_gbs(clock: Clock) -> tuple[float, float]:
    import cupy

    free_bytes, _ = cupy.cuda.runtime.memGetInfo()
    elements = min(_MEMORY_BYTES, free_bytes // 4) // 4 // 1024 * 1024
    source = normal(cupy, (elements,), np.dtype(np.float32), seed=0)
    target = cupy.empty_like(source)
    kernel = cupy.RawKernel(_READ_SOURCE, "read_only")
    quads = cupy.int64(source.size // 4)
    grid = (8 * cupy.cuda.Device().attributes["MultiProcessorCount"],)
    nbytes = source.nbytes
    read_ms = _median_ms(clock, lambda: kernel(grid, (256,), (source, quads, target)), 2)
    copy_ms = _median_ms(clock, lambda: target.data.copy_from_device_async(source.data, nbytes), 2)
    return nbytes / read_ms / 1e6, 2 * nbytes / copy_ms / 1e6


def _gemm_tflops(clock: Clock, dtype: str) -> float:
    import cupy
    from cupy._core import _routines_linalg as linalg

    n = 8192
    a, b = (normal(cupy, (n, n), np.dtype(dtype), seed) for seed in (1, 2))
    if dtype != "float32":
        return 2.0 * n**3 / _median_ms(clock, lambda: a.dot(b), 4) / 1e9
    before = linalg.get_compute_type(a.dtype)
    linalg.set_compute_type(a.dtype, linalg.COMPUTE_TYPE_FP32)  # whatever CUPY_TF32 says
    try:
        return 2.0 * n**3 / _median_ms(clock, lambda: a.dot(b), 1) / 1e9
    finally:
        linalg.set_compute_type(a.dtype, before)


def _median_ms(clock: Clock, call: Call, calls: int) -> float:
    call()
    samples = []
    for _ in range(_SAMPLES):
        samples.append(clock.burst(call, calls)())
        clock.rest()
    return statistics.median(samples)
