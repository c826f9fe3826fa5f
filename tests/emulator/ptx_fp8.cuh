// The functions of cufa/kernels/ptx_fp8.cuh on the host.
#pragma once
#include "ptx_e4m3.cuh"
#include "ptx_sm90.cuh"

struct float8 {
    unsigned char bits;
};
inline float wide(float8 x) {
    const uint32_t magnitude = x.bits & 0x7f, sign = x.bits >> 7 << 31;
    const float value = magnitude == 0x7f ? NAN : __uint_as_float(magnitude << 20) * 0x1p120f;
    return __uint_as_float(__float_as_uint(value) | sign);
}
template <>
inline float8 narrow(float x) {
    return {e4m3(x)};
}
inline float load_early(const float* p) { return *p; }

template <>
inline void mma_m16n8k16<float8>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Sums {
        float values[4];
    };
    const Sums sums = emulator::meet<6>({a[0], a[1], a[2], a[3], b0, b1}, [](auto& words, int lane) {
        const auto number = [&](int row, int word, int k) {
            const uint32_t four = words[row * 4 + k % 16 / 4][word];
            return wide(float8{static_cast<unsigned char>(four >> k % 4 * 8)});
        };
        Sums sums{};
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 32; ++k)
                sums.values[i] += number(lane / 4, i / 2 + k / 16 * 2, k) * number(lane % 4 * 2 + i % 2, 4 + k / 16, k);
        return sums;
    });
    for (int i = 0; i < 4; ++i) d[i] += sums.values[i];
}

// Sums are those of a tensor core: the terms are cut off 13 bits below the largest one's first.
void wgmma_ss_e4m3(Accumulators d, int columns, uint64_t a, uint64_t b, int accumulate);
void wgmma_rs_e4m3(Accumulators d, int columns, const uint32_t (&a)[4], uint64_t b, int accumulate);

template <int N>
struct Wgmma<float8, N> {
    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {
        wgmma_ss_e4m3(d, N, a, b, accumulate);
    }
    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, uint64_t a2, uint64_t b2, int accumulate) {
        ss(d, a, b, accumulate), ss(d, a2, b2, 1);
    }
    static void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
        wgmma_rs_e4m3(d, N, a, b, accumulate);
    }
};
