// The PTX instructions of quantize.cu, one a function.
#pragma once
#include "ptx_e4m3.cuh"

// Raises a number in global memory, in no order.
__device__ inline void red_max(uint32_t* p, uint32_t x) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// The larger of two; NaN if one is.
__device__ inline float max_or_nan(float a, float b) {
    float y;
    asm("max.ftz.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
