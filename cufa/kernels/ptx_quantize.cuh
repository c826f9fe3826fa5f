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

// A number that is not negative over 448, rounded to nearest where the quotient is 2^-126 or more:
// a product, and a correction that its remainder gives, without flushing it (Markstein 1990).
__device__ inline float by_448(float x) {
    float y;
    asm("{\n.reg .f32 q, r;\nmul.rn.f32 q, %1, %2;\nfma.rn.f32 r, q, %3, %1;\n"
        "fma.rn.f32 %0, r, %2, q;\n}"
        : "=f"(y)
        : "f"(x), "f"(1.f / 448.f), "f"(-448.f));
    return y;
}

// 1 / x, rounded to nearest; neither x nor 1 / x is below 2^-126.
__device__ inline float reciprocal(float x) {
    float y;
    asm("{\n.reg .f32 a, e;\nrcp.approx.ftz.f32 a, %1;\nfma.rn.f32 e, a, %1, %2;\n"
        "neg.f32 e, e;\nfma.rn.f32 %0, a, e, a;\n}"
        : "=f"(y)
        : "f"(x), "f"(-1.f));
    return y;
}
