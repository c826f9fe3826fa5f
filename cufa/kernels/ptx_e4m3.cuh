// The conversion to 8-bit floating point, for sm_89 and later.
#pragma once
#include "ptx.cuh"

// Four numbers rounded to the nearest of e4m3, a in the lowest byte; 448 stands for larger ones.
__device__ inline uint32_t pack4_e4m3(float a, float b, float c, float d) {
    uint32_t y;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
        : "=r"(y)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return y;
}
