// Division by a number that the host knows.
#pragma once
#include "ptx.cuh"

// Divides numbers below 2^31 (Granlund and Montgomery 1994): a multiplication takes the place of a
// few dozen instructions.
struct Divisor {
    uint32_t multiplier;  // 2^(32 + shift) / divisor, rounded up
    int shift, divisor;

    __device__ int quotient(int n) const {
        return divisor == 1 ? n : static_cast<int>(__umulhi(n, multiplier) >> shift);
    }
    __device__ int remainder(int n) const { return n - quotient(n) * divisor; }
};
