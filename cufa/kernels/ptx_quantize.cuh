// The PTX instructions of quantize.cu, one a function.
#pragma once
#include "ptx.cuh"

// Four numbers, -448 to 448 or NaN, as e4m3, rounded to nearest, a in the lowest byte; sm_89 and
// later.
__device__ inline uint32_t pack4_e4m3(float a, float b, float c, float d) {
    uint32_t y;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(y)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return y;
}

// Raises a number in global memory, in no order.
__device__ inline void red_max(uint32_t* p, uint32_t x) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
