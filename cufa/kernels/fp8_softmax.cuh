// The softmax for P in e4m3, which ends at 448.
#pragma once
#include "ptx_fp8.cuh"
#include "softmax.cuh"

// 2^x by a polynomial of third degree, wrong by 1e-4 at most: the unit for exponentials is slower
// than all others. x from -INF to 127.
__device__ inline float exp2_polynomial(float x) {
    constexpr float ROUND = 0x1.8p23f;  // to whole numbers, which are the low bits then
    x = fmaxf(x, -126.f);
    const float whole = x + ROUND, f = x - (whole - ROUND);
    const float y = fmaf(fmaf(fmaf(0.05550410866f, f, 0.2402265070f), f, 0.6931471806f), f, 1.f);
    return __uint_as_float(__float_as_uint(y) + (__float_as_uint(whole) << 23));
}

// P = 2^8 exp(S - m) of a row, in which m is about its largest score so far: below 2^-9 P is 0, and
// one above 448 would be 448 unnoticed. The row sum takes P before it is rounded.
//
// A tile of rows begins with row maxima (`follow`). Later tiles of keys do without: P is computed
// with the m that there is, in float32, and added up. As long as a thread's sum of the tile is
// below MAX_SUM, so is each P. Else m moves and P with it (`shift`), before P is rounded; or if P
// has grown so far that small ones may be lost, S is computed once more, for its maxima.
template <int POLYNOMIALS>
struct Softmax8 : OnlineSoftmax<1, false, 8> {
    using Base = OnlineSoftmax<1, false, 8>;
    static constexpr float AT_MAX_LOG2 = 8.f, SLACK_LOG2 = 0.8f;
    static constexpr float MAX_SUM = 440.f;

    __device__ Softmax8() : Base(1.f) {}  // takes maxima in log2 units

    // Takes m to the largest scores, `factor` bringing those of either row to log2 units. Whether
    // it has moved for some rows, so that O must be rescaled.
    template <int NT>
    __device__ bool follow(const float (&rS)[1][NT][4], const float (&factor)[2]) {
        float row_max[2];
        bool grown = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_max[h] = fmaxf(rS[0][0][2 * h], rS[0][0][2 * h + 1]);
#pragma unroll
            for (int nt = 1; nt < NT; ++nt)
                row_max[h] = fmaxf(row_max[h], fmaxf(rS[0][nt][2 * h], rS[0][nt][2 * h + 1]));
            row_max[h] *= factor[h];
            grown |= row_max[h] - this->m[0][h].value() > AT_MAX_LOG2 + SLACK_LOG2;
        }
        if (!__any_sync(0xffffffff, grown)) return false;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            this->update_row_max(lanes_max<4>(row_max[h]), 0, h, SLACK_LOG2);
        return true;
    }

    // Where maxima were not looked for: whether P may be too large in the warp. No P is larger than
    // a thread's sum of this tile's.
    __device__ bool may_pass(float bound) const {
        return __any_sync(0xffffffff, this->l[0][0] > bound || this->l[0][1] > bound);
    }
    // Then m moves up until these sums are 2^7 at most. The largest P is a power of two then, and
    // is not rounded: where a row's weight is on one key, its V comes out exact. O must be
    // rescaled.
    template <int NT>
    __device__ void shift(float (&rP)[1][NT][4]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = rP[0][0][2 * h];
#pragma unroll
            for (int i = 1; i < NT * 2; ++i) largest = fmaxf(largest, rP[0][i / 2][2 * h + i % 2]);
            const float sum = lanes_max<4>(this->l[0][h]);
            const float log2 = __log2f(lanes_max<4>(largest));
            const float goal = floorf(7.f - __log2f(sum) + log2);  // of the largest P
            const float step = sum > MAX_SUM ? log2 - goal : 0.f;
            this->m[0][h] = this->m[0][h].value() + step;
            this->alpha[0][h] = exp2_approx(-step);
            this->l[0][h] *= this->alpha[0][h];
        }
        this->rescale(rP);
    }

    // S -> P = 2^8 exp(S - m) in place.
    template <int NT>
    __device__ void exponentiate(float (&rS)[1][NT][4], const float (&factor)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& s = rS[0][nt][2 * h + i];
                    const float x = fmaf(s, factor[h], -this->m[0][h].value());
                    s = nt % 8 < POLYNOMIALS ? exp2_polynomial(x) : exp2_approx(x);
                    this->l[0][h] += s;
                }
    }
};
