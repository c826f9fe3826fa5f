// Elements of 8 bits as numbers of 16 bits, exactly: four bytes become two registers of two.
#pragma once
#include "ptx_convert.cuh"
#include "ptx_expand.cuh"

// Both halves of a register.
__device__ constexpr uint32_t twice(uint32_t half) { return half << 16 | half; }

// How the bits of e4m3 lie in a type of 16 bits: shifted, they are a number that a power of two
// brings to its value.
template <class T>
struct E4m3In {
    static constexpr bool IS_FLOAT16 = true;
    static constexpr int SHIFT = 7;
    static constexpr uint32_t BITS = 0xbf80, FACTOR = 0x5c00,
                              MOST = 0x5880;  // 448 times this is finite, 480 times this is not
};
template <>
struct E4m3In<bfloat16> {
    static constexpr bool IS_FLOAT16 = false;
    static constexpr int SHIFT = 4;
    static constexpr uint32_t BITS = 0x87f0, FACTOR = 0x7b80, MOST = 0x7b10;
};

// Integers. A byte is the last digits of a number of 16 bits whose others are known.
struct Int8 {
    template <class T>
    static __device__ void expand(uint32_t (&two)[2], uint32_t four) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t which = i == 0 ? 0x4140 : 0x4342;
            if constexpr (E4m3In<T>::IS_FLOAT16) {  // 1024 + 128 + x - 1152
                two[i] = fma2<T>(permuted(four ^ 0x80808080, 0x64646464, which), twice(0x3c00),
                                 twice(0xe480));
            } else {  // of 8 digits: 128 + the last seven of x, less 128 or 256
                const uint32_t x = permuted(four, 0x43434343, which);
                two[i] = fma2<T>(x & twice(0xff80), twice(0xbf80), x & twice(0xff7f));
            }
        }
    }
    // Pairs of every other byte, as float16.
    static __device__ void expand_columns(uint32_t (&two)[2], uint32_t four) {
        const uint32_t from_0 = four ^ 0x80808080;  // plus 128
#pragma unroll
        for (int i = 0; i < 2; ++i)  // 1024 + 128 + x - 1152
            two[i] = fma2<float16>(permuted(from_0, 0x64646464, i == 0 ? 0x4240 : 0x4341),
                                   twice(0x3c00), twice(0xe480));
    }
};

// A sign, four bits of exponent and three of mantissa; all ones but for the sign is NaN.
struct E4m3 {
    // Pairs of every other byte, as float16.
    static __device__ void expand_columns(uint32_t (&two)[2], uint32_t four) {
        expand<float16>(two, permuted(four, 0, 0x3120));
    }
    template <class T>
    static __device__ void expand(uint32_t (&two)[2], uint32_t four) {
        if constexpr (EXPANDS_E4M3)
            by_instruction<T>(two, four);
        else
            by_bits<T>(two, four);
    }
    template <class T>
    static __device__ void by_instruction(uint32_t (&two)[2], uint32_t four) {
        expand_e4m3(two, four);
        if constexpr (!E4m3In<T>::IS_FLOAT16)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                two[i] = pack2<T>(low_to_float<float16>(two[i]), high_to_float<float16>(two[i]));
    }
    template <class T>
    static __device__ void by_bits(uint32_t (&two)[2], uint32_t four) {
        using In = E4m3In<T>;
        constexpr uint32_t ZERO = twice(0x8000);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t bits =
                permuted(four, 0, i == 0 ? 0x9180 : 0xb3a2) << In::SHIFT & twice(In::BITS);
            const uint32_t x = fma2<T>(bits, twice(In::FACTOR), ZERO);
            // 480 stands for NaN.
            two[i] = fma2<T>(fma2<T>(x, twice(In::MOST), ZERO), 0, x);
        }
    }
};
