"""What the card can do at best: memory and matrix ceilings, measured beside the contestants."""

from __future__ import annotations

import statistics

import cupy

from benchmarks.inputs import DTYPES
from benchmarks.timing import Call, CudaClock

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


def measure(clock: CudaClock) -> dict[str, float]:
    """Return the read-only and copy bandwidth in GB/s and the bf16 matrix rate in TFLOP/s.

    A copy counts the bytes read and the bytes written. The product is 8192 x 8192 x 8192 through
    cuBLAS. Data are random, as some products run faster on zeros.
    """
    read_gbs, copy_gbs = _memory_gbs(clock)
    tflops = _gemm_tflops(clock)
    cupy.get_default_memory_pool().free_all_blocks()
    return {
        "read_gbs": round(read_gbs, 1),
        "copy_gbs": round(copy_gbs, 1),
        "gemm_bf16_tflops": round(tflops, 1),
    }


def _memory_gbs(clock: CudaClock) -> tuple[float, float]:
    source = cupy.tile(cupy.random.default_rng(0).standard_normal(1 << 26, dtype=cupy.float32), 16)
    target = cupy.empty_like(source)
    kernel = cupy.RawKernel(_READ_SOURCE, "read_only")
    quads = cupy.int64(source.size // 4)
    grid = (8 * cupy.cuda.Device().attributes["MultiProcessorCount"],)
    nbytes = source.nbytes
    read_ms = _median_ms(clock, lambda: kernel(grid, (256,), (source, quads, target)), 2)
    copy_ms = _median_ms(clock, lambda: target.data.copy_from_device_async(source.data, nbytes), 2)
    return nbytes / read_ms / 1e6, 2 * nbytes / copy_ms / 1e6


def _gemm_tflops(clock: CudaClock) -> float:
    n = 8192
    rng = cupy.random.default_rng(0)
    a, b = (
        rng.standard_normal((n, n), dtype=cupy.float32).astype(DTYPES["bfloat16"]) for _ in "ab"
    )
    return 2.0 * n**3 / _median_ms(clock, lambda: a.dot(b), 4) / 1e9


def _median_ms(clock: CudaClock, call: Call, calls: int) -> float:
    call()
    samples = []
    for _ in range(_SAMPLES):
        samples.append(clock.burst(call, calls)())
        clock.rest()
    return statistics.median(samples)
