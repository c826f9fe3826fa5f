"""Kernels without shared memory compiled as C++ for the host, where threads run one by one.

Their source is taken as it is; PTX and what is CUDA's own are replaced.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from shared_libraries import COMPILER, Sources

from cufa.compiler import source
from cufa.specs.instance import Instance

KERNELS = Path(source.__file__).parents[1] / "kernels"

PTX = """
#pragma once
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define INF __builtin_inff()
using std::min;
using std::max;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, gridDim;
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline void launch_dependents() {}
inline void wait_for_kernel_in_front() {}
struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
inline float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t bits_of(float x, float16) {
    _Float16 y = x;
    unsigned short bits;
    std::memcpy(&bits, &y, 2);
    return bits;
}
inline uint32_t bits_of(float x, bfloat16) {
    const uint32_t bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <class T>
uint32_t pack2(float lo, float hi) { return bits_of(lo, T{}) | bits_of(hi, T{}) << 16; }
"""
CONVERT = """
#pragma once
#include "ptx.cuh"
inline float to_float(float16 x) { _Float16 y; std::memcpy(&y, &x.bits, 2); return y; }
inline float to_float(bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
inline float to_float(float x) { return x; }
"""
RUN = """
extern "C" void run_{i}(const {params}* p, const unsigned* grid, unsigned threads) {{
    gridDim = {{grid[0], grid[1], grid[2]}};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
                for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {name}(*p);
}}
"""


def compiled(params: str, instances: Sequence[Instance]) -> dict[Instance, Any]:
    """Compile instantiations of one kernel into functions that `cufa.launch` can launch.

    Parameters
    ----------
    params : str
        Name of the struct that the kernel takes.
    instances : sequence of Instance
    """
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    sources = Sources(KERNELS, own={"ptx.cuh": PTX, "ptx_convert.cuh": CONVERT})
    lines = [f'#include "{instances[0].kernel}.cu"']
    for i, instance in enumerate(instances):
        lines.append(RUN.format(i=i, params=params, name=instance.name_expression))
    try:
        loaded = ctypes.CDLL(str(sources.library("\n".join(lines))))
    except RuntimeError as error:
        if "_Float16" in str(error):
            pytest.skip(f"{COMPILER} has no _Float16")
        raise
    return {each: _launchable(loaded[f"run_{i}"]) for i, each in enumerate(instances)}


def _launchable(run: Any) -> Callable[..., None]:
    def function(grid: Any, block: Any, args: Any, smem_bytes: int) -> None:
        assert block[1:] == (1, 1)
        assert smem_bytes == 0
        run(ctypes.c_void_p(args[0].ptr), (ctypes.c_uint32 * 3)(*grid), block[0])

    return function
