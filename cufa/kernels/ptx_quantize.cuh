// PTX of quantize.cu: an instruction, or a division made of a few, a function.
#pragma once
#include "ptx.cuh"

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

// x / 448 of a number that is not negative, rounded to nearest where it is 2^-126 or more: a
// product, corrected by its remainder, which is not flushed (Markstein 1990).
__device__ inline float over_448(float x) {
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

// A number of float32, as bits, without what the upper half is alone: exact, and not flushed.
__device__ inline uint32_t without_upper_half(uint32_t x) {
    float y;
    asm("sub.rn.f32 %0, %1, %2;"
        : "=f"(y)
        : "f"(__uint_as_float(x)), "f"(__uint_as_float(x & 0xffff0000u)));
    return __float_as_uint(y);
}
