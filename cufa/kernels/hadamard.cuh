// A Hadamard transform of rows, but for the norm. Four lanes have a row: lane t has the columns
// 32 u + 8 t + i of unit u, for i < 8.
//
// The transform has a step for each bit of a column's number, in any order: sums and differences of
// columns that differ in this bit. Tensor cores take four of these steps at once, those of t and of
// the two lowest bits of i, as a product with a matrix of signs. The columns of the other steps are
// in one thread, so lanes exchange nothing.
#pragma once
#include "ptx_expand.cuh"
#include "ptx_quantize.cuh"

// The factor that makes the transform orthonormal.
template <int TOGETHER>
constexpr float norm() {
    return TOGETHER == 32    ? 0.17677669529663687f
           : TOGETHER == 64  ? 0.125f
           : TOGETHER == 128 ? 0.08838834764831845f
                             : 0.0625f;
}

template <class T>
struct Factor {  // the type of a product's factors, and 1 as bits
    using Type = T;
    static constexpr uint32_t ONE = 0x3c00;
};
template <>
struct Factor<bfloat16> {
    using Type = bfloat16;
    static constexpr uint32_t ONE = 0x3f80;
};
template <>
struct Factor<float> : Factor<bfloat16> {};

// The matrix of signs: an entry is -1 if its row and its column have an odd number of bits in
// common. Bit 0 and bit 3 of either are the lowest bits of i, the others are t.
template <class T>
class Signs {
    static constexpr uint32_t NEGATIVE = 0x80008000u;
    uint32_t word;  // an operand of mma

    // Adds the product of four words of each lane, two numbers each, to d. The last two are further
    // rows of the operand.
    __device__ void add_product(float (&d)[2][4], uint32_t w0, uint32_t w1, uint32_t w2,
                                uint32_t w3) const {
        const uint32_t a[4] = {w0, w2, w1, w3};
        mma_m16n8k16<typename Factor<T>::Type>(d[0], a, word, word);
        mma_m16n8k16<typename Factor<T>::Type>(d[1], a, word, word ^ NEGATIVE);
    }

 public:
    __device__ Signs() : word(Factor<T>::ONE * 0x10001u) {
        const int lane = reread_thread_index() % 32;  // here: no register is left for the result
        const int row = lane % 4 * 2, column = lane / 4;
        if (__popc(row & column) & 1) word ^= NEGATIVE;
        if (column & 1) word ^= NEGATIVE & 0xffff0000u;
    }
    // Adds the first four steps of a unit to d.
    __device__ void multiply(float (&d)[2][4], const uint32_t (&words)[4]) const {
        add_product(d, words[0], words[1], words[2], words[3]);
    }
    // float32 is the sum of three numbers of bfloat16, but for what it holds below 2^-133.
    __device__ void multiply(float (&d)[2][4], const uint32_t (&words)[8]) const {
        uint32_t x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = words[i];
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            add_product(d, permuted(x[0], x[1], 0x7632), permuted(x[2], x[3], 0x7632),
                        permuted(x[4], x[5], 0x7632), permuted(x[6], x[7], 0x7632));
            if (part < 2)
#pragma unroll
                for (int i = 0; i < 8; ++i) x[i] = without_upper_half(x[i]);
        }
    }
};

__device__ inline void butterfly(float& a, float& b) {
    const float sum = a + b, difference = a - b;
    a = sum, b = difference;
}

// Transforms numbers of type T, given as words, TOGETHER columns at a time.
template <class T, int TOGETHER, int UNITS, int WORDS>
__device__ void transform(float (&x)[UNITS][8], const uint32_t (&words)[UNITS][WORDS]) {
    const Signs<T> signs;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
        float d[2][4] = {};
        signs.multiply(d, words[u]);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[u][i] = d[i / 2 % 2][i % 2 + i / 4 * 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) butterfly(x[u][i], x[u][4 + i]);
    }
#pragma unroll
    for (int step = 1; step < TOGETHER / 32; step *= 2)
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (!(u & step)) butterfly(x[u][i], x[u + step][i]);
}
