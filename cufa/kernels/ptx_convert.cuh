// The two 16-bit types as float32, exactly.
#pragma once
#include "ptx.cuh"

__device__ inline float to_float(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ inline float to_float(bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
__device__ inline float to_float(float x) { return x; }

// The halves of a register that holds two.
template <class T>
__device__ float low_to_float(uint32_t two) {
    return to_float(T{static_cast<unsigned short>(two)});
}
template <class T>
__device__ float high_to_float(uint32_t two) {
    return to_float(T{static_cast<unsigned short>(two >> 16)});
}
template <>
__device__ inline float high_to_float<bfloat16>(uint32_t two) {
    return __uint_as_float(two & 0xffff0000u);
}
