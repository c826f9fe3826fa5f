// The functions of cufa/kernels/ptx_quantize.cuh on the host.
#pragma once
#include "ptx.cuh"

// The nearest number of e4m3, whose numbers rise with their bytes; the even one of two.
inline uint32_t e4m3(float x) {
    if (x != x) return 0x7f;
    const auto number = [](uint32_t byte) {
        const uint32_t exponent = byte >> 3, mantissa = byte & 7;
        return std::ldexp(exponent ? 8. + mantissa : mantissa, (exponent ? int(exponent) : 1) - 10);
    };
    const double magnitude = std::fabs(static_cast<double>(x));
    uint32_t byte = 0;
    while (byte < 0x7e && number(byte + 1) <= magnitude) ++byte;
    if (byte < 0x7e) {
        const double down = magnitude - number(byte), up = number(byte + 1) - magnitude;
        if (up < down || (up == down && byte & 1)) ++byte;
    }
    return byte | (std::signbit(x) ? 0x80 : 0);
}
inline uint32_t pack4_e4m3(float a, float b, float c, float d) {
    return e4m3(a) | e4m3(b) << 8 | e4m3(c) << 16 | e4m3(d) << 24;
}
inline void red_max(uint32_t* p, uint32_t x) { *p = std::max(*p, x); }
