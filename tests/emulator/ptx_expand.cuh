// The functions of cufa/kernels/ptx_expand.cuh on the host.
#pragma once
#include "ptx.cuh"

inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t which) {
    const uint64_t all = static_cast<uint64_t>(b) << 32 | a;
    uint32_t y = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t digit = which >> 4 * i & 15, byte = all >> 8 * (digit % 8) & 0xff;
        y |= (digit < 8 ? byte : byte < 128 ? 0 : 0xff) << 8 * i;
    }
    return y;
}
template <class T>
uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    float y[2];
    for (int i = 0; i < 2; ++i) {
        const double exact = static_cast<double>(element<T>(a, i)) * element<T>(b, i) + element<T>(c, i);
        y[i] = static_cast<float>(exact);
    }
    return pack2<T>(y[0], y[1]);
}
void mma_m16n8k32_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
constexpr bool EXPANDS_E4M3 = true;
inline float e4m3_value(uint32_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float magnitude = (byte & 0x7f) == 0x7f ? NAN
                            : exponent == 0       ? std::ldexp(static_cast<float>(mantissa), -9)
                                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return byte & 0x80 ? -magnitude : magnitude;
}
inline void expand_e4m3(uint32_t (&two)[2], uint32_t four) {
    for (int i = 0; i < 2; ++i)
        two[i] = pack2<float16>(e4m3_value(four >> 16 * i & 0xff), e4m3_value(four >> (16 * i + 8) & 0xff));
}
