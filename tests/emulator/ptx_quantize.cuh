// The functions of cufa/kernels/ptx_quantize.cuh on the host.
#pragma once
#include "ptx.cuh"

inline void red_max(uint32_t* p, uint32_t x) { *p = std::max(*p, x); }
inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline float over_448(float x) { return x / 448.f; }
inline float reciprocal(float x) { return 1.f / x; }
inline uint32_t without_upper_half(uint32_t x) { return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & 0xffff0000u)); }
