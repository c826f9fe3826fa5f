// The functions of cufa/kernels/ptx_fp8.cuh on the host.
#pragma once
#include "ptx_e4m3.cuh"
#include "ptx_sm90.cuh"

struct float8 {
    unsigned char bits;
};
inline float wide(float8 x) {
    const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
    const float value = (x.bits & 0x7f) == 0x7f ? NAN
                        : exponent ? std::ldexp(8.f + mantissa, exponent - 10)
                                   : std::ldexp(static_cast<float>(mantissa), -9);
    return x.bits & 0x80 ? -value : value;
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
template <int N>
struct Wgmma<float8, N> {
    using Accumulators = float (*)[4];

    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {
        const Accumulators rD = d;
        const int thread = threadIdx.x;
        emulator::thread->products.add([=] {
            float rows[2][32];
            const Operand8 of_a(a);
            for (int h = 0; h < 2; ++h) of_a.row(thread % 128 / 32 * 16 + thread % 32 / 4 + 8 * h, rows[h]);
            multiply(rD, rows, thread % 4, accumulate, b);
        });
    }
    static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, uint64_t a2, uint64_t b2, int accumulate) {
        ss(d, a, b, accumulate), ss(d, a2, b2, 1);
    }
    static void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
        struct Rows {
            float values[2][32];
        };
        const Rows rows = emulator::meet<4>({a[0], a[1], a[2], a[3]}, [](auto& words, int lane) {
            Rows rows;
            for (int h = 0; h < 2; ++h)
                for (int k = 0; k < 32; ++k) {
                    const uint32_t four = words[lane / 4 * 4 + k % 16 / 4][h + k / 16 * 2];
                    rows.values[h][k] = wide(float8{static_cast<unsigned char>(four >> k % 4 * 8)});
                }
            return rows;
        });
        const Accumulators rD = d;
        const int thread = threadIdx.x;
        emulator::thread->products.add([=] { multiply(rD, rows.values, thread % 4, accumulate, b); });
    }

 private:
    // An operand in shared memory, K along its rows' bytes.
    struct Operand8 : Operand<bfloat16> {
        using Operand<bfloat16>::Operand;
        void row(int row, float (&values)[32]) const {
            const uint32_t first = this->start + row / 8 * this->eight_rows + row % 8 * this->row_bytes;
            for (int k = 0; k < 32; ++k)
                values[k] = wide(float8{*emulator::shared(swizzled(first + k, this->row_bytes), 1)});
        }
    };
    static void multiply(Accumulators d, const float (&rows)[2][32], int lane, int accumulate, uint64_t b) {
        const Operand8 of_b(b);
        for (int i = 0; i < N / 8; ++i)
            for (int e = 0; e < 2; ++e) {
                float column[32];
                of_b.row(8 * i + 2 * lane + e, column);
                for (int h = 0; h < 2; ++h) {
                    float& sum = d[i][2 * h + e];
                    sum = add_up(rows[h], column, accumulate ? sum : 0.f);
                }
            }
    }
    static float add_up(const float (&a)[32], const float (&b)[32], float sum) {
        float largest = std::fabs(sum);
        for (int k = 0; k < 32; ++k) largest = std::max(largest, std::fabs(a[k] * b[k]));
        for (int k = 0; k < 32; ++k)
            if (a[k] * b[k] != a[k] * b[k]) return NAN;
        if (sum != sum) return NAN;
        if (!(largest > 0x1p-100f)) return 0.f;
        const float unit = __uint_as_float(__float_as_uint(largest) & 0x7f800000) * 0x1p-13f, inverse = 1.f / unit;
        float units = std::trunc(sum * inverse);
        for (int k = 0; k < 32; ++k) units += std::trunc(a[k] * b[k] * inverse);
        return units * unit;
    }
};
