// A Hadamard transform of rows that several lanes hold, but for the norm. A lane first has a group
// of columns that follow each other, then, after an exchange, a unit of each group. Lane i has unit
// k ^ i of its group as its k-th, and then that of group k ^ i: so all lanes send and get their
// k-th unit at once, and other registers need not move.
#pragma once
#include "ptx.cuh"

// By what sums are multiplied, so that the transform is orthonormal.
template <int TOGETHER>
constexpr float norm() {
    return TOGETHER == 32    ? 0.17677669529663687f
           : TOGETHER == 64  ? 0.125f
           : TOGETHER == 128 ? 0.08838834764831845f
                             : 0.0625f;
}

__device__ inline void butterfly(float& a, float& b) {
    const float sum = a + b, difference = a - b;
    a = sum, b = difference;
}

// Adds and subtracts units. In some lanes the second of two is the one of lower columns; the
// products are exact.
template <int LANES, int UNITS, int UNIT>
__device__ void butterflies_of_units(float (&x)[UNITS][UNIT], int lane) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const float sign = lane & step ? -1.f : 1.f;
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int e = 0; e < UNIT; ++e)
                if (!(u & step)) {
                    float &a = x[u][e], &b = x[u + step][e];
                    const float first = fmaf(a, sign, b), second = fmaf(b, -sign, a);
                    a = first, b = second;
                }
    }
}

// Sends the k-th unit to the lane whose number is k ^ that of ours, and gets its k-th.
template <int LANES, class X, int UNITS, int N>
__device__ void exchange(X (&x)[UNITS][N]) {
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (u % LANES) x[u][i] = __shfl_xor_sync(0xffffffff, x[u][i], u % LANES);
}

template <int LANES, int UNITS, int UNIT>
__device__ void transform(float (&x)[UNITS][UNIT], int lane) {
#pragma unroll
    for (int step = 1; step < UNIT; step *= 2)
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int e = 0; e < UNIT; ++e)
                if (!(e & step)) butterfly(x[u][e], x[u][e + step]);
    butterflies_of_units<LANES>(x, lane);
    exchange<LANES>(x);
    butterflies_of_units<LANES>(x, lane);
}

// Puts units in order, of which lane i has number k ^ i as its k-th.
template <int LANES, int UNITS, int WORDS>
__device__ void put_in_order(uint32_t (&y)[UNITS][WORDS], int lane) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int i = 0; i < WORDS; ++i)
                if (!(u & step)) {
                    uint32_t &a = y[u][i], &b = y[u + step][i];
                    const uint32_t first = lane & step ? b : a, second = lane & step ? a : b;
                    a = first, b = second;
                }
}
