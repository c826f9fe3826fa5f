#pragma once
#include "ptx.cuh"

// Larger for larger elements, of equal ones for the first; no two are the same, and none is 0.
__device__ inline uint64_t key_of(float x, int place) {
    const uint32_t bits = __float_as_uint(x + 0.f);  // -0 is 0
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(place);
}

__device__ inline int place_of(uint64_t key) { return ~static_cast<uint32_t>(key); }
