// The online softmax on accumulator fragments (FlashAttention-2, algorithm 1, lines 8 to 10 and 12). Other than there, the
// reference m follows the running row maximum only where P would grow too large: O / l is the same for any m.
#pragma once
#include "ptx.cuh"

// State of the rows that one thread holds: 16 mt + {0, 8} of its warp's rows, shared with three other lanes.
// EXACT spends an instruction a score, and a division an output, on rounding errors that float32 would show: P is
// exactly 1 at a row's maximum, so that a row with one key gives back its V.
template <int MT, bool EXACT>
struct OnlineSoftmax {
    // The accumulators are rescaled only when a row maximum has outgrown the reference by this factor
    // (as a power of two): P then stays below 2^8, and the division by l at the end is exact all the same.
    static constexpr float SLACK_LOG2 = 8.f;
    // What `shift` makes a row sum: P of 2^17 keys that score the same are normal numbers of float16 still.
    static constexpr float SHIFTED_SUM = 16.f;

    float scale_log2;
    float m[MT][2];    // reference maximum of the unscaled scores
    float l[MT][2];    // this thread's part of the row sum
    float alpha[MT][2];  // exp(old reference - new one), of the last time that they moved

    __device__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) { reset(); }
    __device__ void reset() {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) m[mt][h] = -INF, l[mt][h] = 0.f;
    }

    // S -> P = exp(S - m) in place; l, and O when m has moved, are brought up to date.
    template <int NT, int OT>
    __device__ void update(float (&rS)[MT][NT][4], float (&rO)[MT][OT][4]) {
        if (raise(rS)) rescale(rO);
        exponentiate(rS);
    }

    // Moves the references m to the running row maxima, if any of the warp's has outgrown its own too far. O must then
    // be rescaled.
    template <int NT>
    __device__ bool raise(const float (&rS)[MT][NT][4]) {
        float row_max[MT][2];
        bool grown = false;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                row_max[mt][h] = fmaxf(rS[mt][0][2 * h], rS[mt][0][2 * h + 1]);
#pragma unroll
                for (int nt = 1; nt < NT; ++nt)
                    row_max[mt][h] = fmaxf(row_max[mt][h], fmaxf(rS[mt][nt][2 * h], rS[mt][nt][2 * h + 1]));
                grown |= (row_max[mt][h] - m[mt][h]) * scale_log2 > SLACK_LOG2;  // false for -inf - -inf
            }
        if (!__any_sync(0xffffffff, grown)) return false;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float m_old = m[mt][h];
                float m_new = fmaxf(m_old, row_max[mt][h]);
                m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, 1));
                m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, 2));
                m[mt][h] = m_new;
                // The first time, m_old is -inf and what alpha multiplies is 0.
                alpha[mt][h] = m_old == -INF ? 0.f : exp2_approx((m_old - m_new) * scale_log2);
                l[mt][h] *= alpha[mt][h];
            }
        return true;
    }

    // S -> P = exp(S - m) in place, added up in l.
    template <int NT>
    __device__ void exponentiate(float (&rS)[MT][NT][4]) {
        float m_safe[MT][2];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) m_safe[mt][h] = m[mt][h] == -INF ? 0.f : m[mt][h];  // -inf - -inf would be NaN
        exponentiate(rS, m_safe);
    }
    // The same where `raise` did not look first: P may come out too large, see `too_large`.
    template <int NT>
    __device__ void exponentiate_unchecked(float (&rS)[MT][NT][4]) {
        exponentiate(rS, m);
    }
    // Whether a thread's part of a row sum, and so maybe a P, is larger than `limit` or not finite, in the warp. Where m
    // is still -inf, for all scores so far were, P are infinite or NaN.
    __device__ bool too_large(float limit) const {
        bool found = false;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) found |= !(l[mt][h] <= limit);  // also for NaN
        return __any_sync(0xffffffff, found);
    }
    // Moves m up where the row sum is larger than SHIFTED_SUM, to make it that, and P and l with it: O must be rescaled.
    // A sum that is not finite tells nothing about the scores: then nothing is done, and the answer is false.
    template <int NT>
    __device__ bool shift(float (&rP)[MT][NT][4]) {
        float sum[MT][2];
        bool finite = true;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                sum[mt][h] = quad_sum(l[mt][h]);
                finite &= sum[mt][h] < INF;  // false for NaN
            }
        if (!__all_sync(0xffffffff, finite)) return false;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float m_old = m[mt][h];
                const float step = __fdividef(__log2f(fmaxf(sum[mt][h] / SHIFTED_SUM, 1.f)), scale_log2);
                // Where the scale is next to 0, P are next to 1, and the step is infinite.
                m[mt][h] = fminf(m_old + step, 0x1.fffffep127f);
                alpha[mt][h] = exp2_approx((m_old - m[mt][h]) * scale_log2);
                l[mt][h] *= alpha[mt][h];
            }
        rescale(rP);
        return true;
    }

    // Brings O to the references that `raise` or `shift` has moved.
    template <int OT>
    __device__ void rescale(float (&rO)[MT][OT][4]) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int ot = 0; ot < OT; ++ot)
#pragma unroll
                for (int i = 0; i < 4; ++i) rO[mt][ot][i] *= alpha[mt][i / 2];
    }

    // Ends a tile of rows, and begins the next: sums l over the four lanes of a row, and returns what O is to be divided
    // by and the log-sum-exp (natural log). A row that saw no key has l = 0: `divide` makes its O 0; its log-sum-exp is -inf.
    __device__ void conclude(float (&divisor)[MT][2], float (&lse)[MT][2]) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float sum = quad_sum(l[mt][h]);
                divisor[mt][h] = sum;
                lse[mt][h] = sum == 0.f ? -INF : (m[mt][h] * scale_log2 + log2f(sum)) * 0.693147180559945309f;
            }
        reset();
    }
    template <int OT>
    __device__ void divide(float (&rO)[MT][OT][4], const float (&divisor)[MT][2]) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float inverse = 1.f / divisor[mt][h];
#pragma unroll
                for (int ot = 0; ot < OT; ++ot)
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; ++i)
                        rO[mt][ot][i] = EXACT ? rO[mt][ot][i] / divisor[mt][h] : rO[mt][ot][i] * inverse;
                // 0 V is NaN where V is not finite. A branch, which the empty asm keeps one, hardly ever taken
                if (!__any_sync(0xffffffff, divisor[mt][h] == 0.f)) continue;
                asm volatile("");
#pragma unroll
                for (int ot = 0; ot < OT; ++ot)
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; ++i)
                        if (divisor[mt][h] == 0.f) rO[mt][ot][i] = 0.f;
            }
    }
    template <int OT>
    __device__ void finish(float (&rO)[MT][OT][4], float (&lse)[MT][2]) {
        float divisor[MT][2];
        conclude(divisor, lse);
        divide(rO, divisor);
    }

 private:
    // The sum over the four lanes of a row.
    static __device__ float quad_sum(float sum) {
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        return sum + __shfl_xor_sync(0xffffffff, sum, 2);
    }
    template <int NT>
    __device__ void exponentiate(float (&rS)[MT][NT][4], const float (&reference)[MT][2]) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float minus_m_log2 = -reference[mt][h] * scale_log2;
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; ++i) {
                        float& s = rS[mt][nt][i];
                        s = exp2_approx(EXACT ? (s - reference[mt][h]) * scale_log2 : fmaf(s, scale_log2, minus_m_log2));
                        l[mt][h] += s;
                    }
            }
    }
};
