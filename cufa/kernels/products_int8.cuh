// S = Q K^T of 8-bit integers on the tensor cores, which add them up exactly: no element of K is
// expanded. Each number of Q is a factor of its row times 256 high + middle + low / 254, three
// bytes. Rounding costs about 2^-24 of the row's largest number.
//
// In shared memory the 32 bytes of 16 numbers hold their 16 high bytes, then the 16 middle ones;
// the low ones are a tile of their own behind. A product has the high bytes of eight rows of Q as
// its first eight rows, and their middle ones as the others, or the low ones of sixteen: a lane
// finds all sums of a score in its own registers.
#pragma once
#include "ptx_convert.cuh"
#include "ptx_expand.cuh"
#include "tile.cuh"

template <class QTile>
using LowBytes = SmemTile<QTile::ROWS, QTile::COLS, 1>;

// The factors of the rows that a lane holds: of 16 mt + {0, 8} + lane / 4 of its warp's.
template <class T, class QTile, int MT>
struct RowFactors {
    // The largest high byte with its middle one is 2^15 times this, and the largest low one 254
    // / 2.
    static constexpr float MOST = 127.f / 128.f;
    static constexpr float LOWS = 254.f;
    static constexpr float LEAST = 0x1p-110f;       // less counts as this, whose inverse is finite
    static constexpr float TO_INTEGER = 0x1.8p23f;  // added, leaves an integer in the low bits

    float of[MT][2];

    // The factors of Q in shared memory, of rows below `rows` and some more; NaN for a row with a
    // number that is not finite.
    __device__ void find(uint32_t sQ, int row0, int rows, int lane) {
#pragma unroll
        for (int i = 0; i < MT * 2; ++i) {
            const int row = row0 + i * 8 + lane / 4;
            if (row0 + i * 8 >= rows) break;
            uint32_t most = 0;  // in the upper half, as bits: NaN is more than all numbers
#pragma unroll
            for (int chunk = 0; chunk < QTile::CHUNKS; chunk += 4) {
                float words[4];
                lds(words, sQ + QTile::offset(row, chunk + lane % 4));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint32_t two = __float_as_uint(words[j]);
                    most = max(most, max(two & 0x7fffffff, two << 16 & 0x7fffffff));
                }
            }
#pragma unroll
            for (int j = 1; j < 4; j *= 2) most = max(most, __shfl_xor_sync(0xffffffff, most, j));
            const float x = high_to_float<T>(most);
            of[i / 2][i % 2] = fmaxf(x, LEAST) * (0x1p-15f / MOST) + (x - x);
        }
    }
    // Puts the bytes in place of the numbers, a part of the columns for each of PARTS warps.
    template <int PARTS>
    __device__ void split(uint32_t sQ, int row0, int rows, int part, int lane) const {
#pragma unroll
        for (int i = 0; i < MT * 2; ++i) {
            const int row = row0 + i * 8 + lane / 4;
            if (row0 + i * 8 >= rows) break;
            const float inverse = reciprocal_approx(of[i / 2][i % 2]);
#pragma unroll 1
            for (int pair = part * 4 + lane % 4; pair < QTile::CHUNKS / 2; pair += PARTS * 4) {
                const uint32_t at = sQ + QTile::offset(row, pair * 2);
                float words[2][4];
                lds(words[0], at), lds(words[1], at ^ 16);
                float high[4], middle[4], low[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float* from = words[j / 2] + j % 2 * 2;
                    uint32_t upper[4], lower[4];
#pragma unroll
                    for (int n = 0; n < 4; ++n) {
                        const uint32_t two = __float_as_uint(from[n / 2]);
                        const float x = n % 2 ? high_to_float<T>(two) : low_to_float<T>(two),
                                    rounded = fmaf(x, inverse, TO_INTEGER),
                                    rest = fmaf(x, inverse, TO_INTEGER - rounded);
                        upper[n] = __float_as_uint(rounded);
                        lower[n] = __float_as_uint(fmaf(rest, LOWS, TO_INTEGER));
                    }
                    middle[j] = of_four(upper, 0x0040), low[j] = of_four(lower, 0x0040);
#pragma unroll
                    for (int n = 0; n < 4; ++n) upper[n] += 128;  // middle bytes have signs
                    high[j] = of_four(upper, 0x0051);
                }
                sts_128(at, make_float4(high[0], high[1], high[2], high[3]));
                sts_128(at ^ 16, make_float4(middle[0], middle[1], middle[2], middle[3]));
                sts_128(sQ + QTile::bytes + LowBytes<QTile>::offset(row, pair),
                        make_float4(low[0], low[1], low[2], low[3]));
            }
        }
    }

 private:
    // A byte of each: `which` names it, of two of them.
    static __device__ float of_four(const uint32_t (&x)[4], uint32_t which) {
        return __uint_as_float(
            permuted(permuted(x[0], x[1], which), permuted(x[2], x[3], which), 0x5410));
    }
};

// S of HALVES times eight rows of Q, from row0 on: a product of high and middle bytes for each
// half, then one of the low bytes. With 16 keys all are taken at once, so that K is loaded once;
// two at once with 128 columns, as four blocks of those share the registers of a multiprocessor.
// Sums of more keys leave no registers for that.
template <class Factors, class QTile, class KTile, int HALVES, int NT>
__device__ void qk_of_halves(float (&rS)[NT][4], const float (&factors)[2], uint32_t tile_q,
                             uint32_t tile_k, int row0) {
    using Low = LowBytes<QTile>;
    constexpr int PRODUCTS = HALVES + 1, AT_ONCE = NT > 2 ? 1 : KTile::CHUNKS == 8 ? 2 : PRODUCTS;
    const int lane = thread_index() % 32;
    const uint32_t lane_q = QTile::offset(lane % 8, lane / 8) + row0 * (QTile::PANEL * 16),
                   lane_low = lane_offset_a<Low>() + row0 * (Low::PANEL * 16),
                   lane_k = lane_offset_b<KTile>();
#pragma unroll
    for (int first = 0; first < PRODUCTS; first += AT_ONCE) {
        const int count = min(AT_ONCE, PRODUCTS - first);
        int sums[AT_ONCE][NT][4] = {};
#pragma unroll(NT > 2 ? 4 : 2)
        for (int kd = 0; kd < KTile::CHUNKS; kd += 2) {
            uint32_t rQ[AT_ONCE][4];
#pragma unroll
            for (int i = 0; i < count; ++i)
                ldmatrix_x4(rQ[i], first + i < HALVES
                                       ? tile_q + QTile::advance(lane_q, (first + i) * 8, kd * 2)
                                       : tile_q + QTile::bytes + Low::advance(lane_low, 0, kd));
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                uint32_t rK[4];
                ldmatrix_x4(rK, tile_k + KTile::advance(lane_k, nt * 8, kd));
#pragma unroll
                for (int i = 0; i < count; ++i) {
                    mma_m16n8k32_int8(sums[i][nt], rQ[i], rK[0], rK[1]);
                    mma_m16n8k32_int8(sums[i][nt + 1], rQ[i], rK[2], rK[3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < count; ++i)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                const auto& sum = sums[i][nt];
                const int half = first + i;
                if (half < HALVES) {
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        rS[nt][half * 2 + n] = static_cast<float>(256 * sum[n] + sum[2 + n]);
                } else {
#pragma unroll
                    for (int n = 0; n < HALVES * 2; ++n)
                        rS[nt][n] =
                            fmaf(static_cast<float>(sum[n]), 1.f / Factors::LOWS, rS[nt][n]) *
                            factors[n / 2];
                }
            }
    }
}

// S of MT times 16 rows of Q from row0 on, those of `rows` that there are. S is zero before.
template <class T, class QTile, class KTile, int MT, int NT>
__device__ void qk_int8(float (&rS)[MT][NT][4], const RowFactors<T, QTile, MT>& factors,
                        uint32_t tile_q, uint32_t tile_k, int row0, int rows) {
    using Factors = RowFactors<T, QTile, MT>;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
        const int first = row0 + mt * 16;
        if (rows > first + 8)
            qk_of_halves<Factors, QTile, KTile, 2>(rS[mt], factors.of[mt], tile_q, tile_k, first);
        else if (rows > first)
            qk_of_halves<Factors, QTile, KTile, 1>(rS[mt], factors.of[mt], tile_q, tile_k, first);
    }
}
