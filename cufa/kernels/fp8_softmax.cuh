// The softmax for P in e4m3, whose largest number is 448.
#pragma once
#include "ptx_fp8.cuh"
#include "softmax.cuh"

// P = 2^(S - m) of a row, in log2 units. Where a maximum sets m, P of the largest score is about
// 2^8; after `make_room` and `shift` it is 2^2 or more. A P of 2^-10 or less is 0, and one above
// 448 would be 448 unnoticed. The row sum takes P before it is rounded.
//
// A tile of rows begins with row maxima (`follow`). Later tiles of keys do without: P is computed
// with the present m, in float32, and added up. As long as a thread's sum of the tile is below
// MAX_SUM, so is each P. Else m moves, and P in float32 with it (`shift`), which is rounded again;
// or if P has grown so far that small ones may be lost, S is computed again, for its maxima. Such a
// correction takes long. If the sums of the first keys are too large already, those of later keys
// would be, too: then m moves after the first keys (`make_room`).
struct Softmax8 : OnlineSoftmax<1, false, 8> {
    using Base = OnlineSoftmax<1, false, 8>;
    static constexpr float AT_MAX_LOG2 = 8.f, SLACK_LOG2 = 0.8f;
    static constexpr float MAX_SUM = 440.f, MAX_SHIFTED = 0x1p60f;
    static constexpr float ROOMY_SUM_LOG2 = 7.f;  // of a sum after m has moved for it

    __device__ Softmax8() : Base(1.f) {}  // takes maxima in log2 units

    // Moves m to the largest scores, which `factor` brings to log2 units, by row. Returns whether
    // it has moved for some rows, so that O must be rescaled.
    template <int NT>
    __device__ bool follow(const float (&rS)[1][NT][4], const float (&factor)[2]) {
        float row_max[2];
        bool grown = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_max[h] = rS[0][0][2 * h];
#pragma unroll
            for (int i = 1; i < NT * 2; ++i)
                row_max[h] = fmaxf(row_max[h], rS[0][i / 2][2 * h + i % 2]);
            row_max[h] *= factor[h];
            grown |= row_max[h] - m[0][h].value() > AT_MAX_LOG2 + SLACK_LOG2;
        }
        if (!__any_sync(0xffffffff, grown)) return false;
#pragma unroll
        for (int h = 0; h < 2; ++h) update_row_max(lanes_max<4>(row_max[h]), 0, h);
        return true;
    }
    __device__ void update_row_max(float row_max, int mt, int h) {
        Base::update_row_max(row_max, mt, h, SLACK_LOG2);
    }

    // Whether a thread of the warp has a sum of P of this tile of keys above MAX_SUM. No P is
    // larger than its sum.
    __device__ bool too_large() const {
        return __any_sync(0xffffffff, l[0][0] > MAX_SUM || l[0][1] > MAX_SUM);
    }
    // After the first keys: where a sum is too large, m moves up by an integer, until the sum has
    // room to grow. P of the largest score stays a power of two.
    template <int NT>
    __device__ void make_room(float (&rP)[1][NT][4]) {
        if (!too_large()) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = lanes_max<4>(l[0][h]);
            // A little more than ROOMY_SUM_LOG2: rounding must not decide about a whole step.
            const float over = __log2f(sum) - (ROOMY_SUM_LOG2 + 0.01f);
            move_up(h, sum > MAX_SUM ? ceilf(over) : 0.f);
        }
        rescale(rP);
    }
    // After other keys: the same, and O must be rescaled. The largest P is then a power of two,
    // which rounding keeps: where a row's weight is on one key, its V comes out exact. `again` says
    // of which rows small P may be lost.
    template <int NT>
    __device__ void shift(float (&rP)[1][NT][4], bool (&again)[1][2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = rP[0][0][2 * h];
#pragma unroll
            for (int i = 1; i < NT * 2; ++i) largest = fmaxf(largest, rP[0][i / 2][2 * h + i % 2]);
            const float sum = lanes_max<4>(l[0][h]);
            const float log2 = __log2f(lanes_max<4>(largest));
            const float goal = floorf(ROOMY_SUM_LOG2 - __log2f(sum) + log2);  // of the largest P
            again[0][h] = sum > MAX_SHIFTED;
            move_up(h, sum > MAX_SUM && !again[0][h] ? log2 - goal : 0.f);
        }
        rescale(rP);
    }

    // S -> P in place, added up in l. Pairs are summed first: ptxas finds a faster order for these.
    template <int NT>
    __device__ void exponentiate(float (&rS)[1][NT][4], const float (&factor)[2]) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            float (&s)[4] = rS[0][nt];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s[e] = exp2_approx(fmaf(s[e], factor[e / 2], -m[0][e / 2].value()));
            l[0][0] += s[0] + s[1], l[0][1] += s[2] + s[3];
        }
    }

 private:
    // Moves m of a row, and its sum. P follows by `rescale`. A large m moves by less or more than
    // the step, which is rounded.
    __device__ void move_up(int h, float step) {
        const float before = m[0][h].value();
        m[0][h] = before + step;
        alpha[0][h] = exp2_approx(before - m[0][h].value());
        l[0][h] *= alpha[0][h];
    }
};
