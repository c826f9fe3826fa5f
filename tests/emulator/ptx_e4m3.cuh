// The functions of cufa/kernels/ptx_e4m3.cuh on the host.
#pragma once
#include "ptx.cuh"

// The nearest number, the even one of two.
inline unsigned char e4m3(float x) {
    const unsigned char sign = __float_as_uint(x) >> 31 << 7;
    const float magnitude = std::fabs(x);
    if (x != x) return 0x7f;
    if (magnitude >= 448.f) return sign | 0x7e;
    // In units of the last place: of subnormal numbers' at least.
    const int exponent = std::max(magnitude == 0.f ? -9 : std::ilogb(magnitude) - 3, -9);
    const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -exponent)));
    return sign | ((exponent + 9) * 8 + units);
}
inline uint32_t pack4_e4m3(float a, float b, float c, float d) {
    uint32_t y = 0;
    const float four[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) y |= static_cast<uint32_t>(e4m3(four[i])) << 8 * i;
    return y;
}
