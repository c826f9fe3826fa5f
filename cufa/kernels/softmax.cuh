// The online softmax on accumulator fragments (FlashAttention-2, algorithm 1, lines 8 to 10 and
// 12), and how fa3_wgmma.cu does without row maxima.
//
// For a row, P = exp2(scale_log2 S - m), l is the sum of its P, and O the sum of P V. O / l is the
// same for any reference m: m need not be the row maximum. It must only keep P, l and O within the
// range of their types. Results of a row depend on its own scores, not on the rows that share its
// warp.
//
// Invariant: at the start of a step, m is either NONE, while the row has seen no key, or near the
// score of a key that the row has seen. P of that key is 2^AT_MAX_LOG2 when m is set. Later scores
// may be larger: m follows only when P would grow too large.
//
// Checked steps (`update_max`, `exponentiate`): m moves up to the maximum of a tile's scores when
// that exceeds m by SLACK_LOG2. They cost a maximum per score, and shuffles between lanes. A tile
// of rows begins with them, until each row has seen a key.
//
// Unchecked steps (`exponentiate`, `too_large`): no maximum is computed. P of all keys is added up
// in l in any case, and no P is larger than l: as long as l stays below its limit
// (PScale::MAX_SUM), each P fits its type. One comparison per row replaces the search for the
// maximum.
//
// Failure: scores rise so far above m that l passes the limit, up to infinity. P of the last tile
// is then too large for 16 bits, but O and the earlier l are still right: O has not taken that P
// yet.
//
// Recovery: if l is finite enough (below MAX_SHIFTED), `shift_max` moves m up by log2 of l and
// scales P and l down with it. Otherwise P has lost what was small: the earlier l is taken back,
// and the scores of this tile are computed once more with their maximum, see rescore_sm90.cuh. O
// follows m by `rescale` in both cases. NaN is never too large: it stays, and the row ends as NaN.
//
// The other direction needs no test: if scores fall far below m, their weights are as small as they
// would be with the row maximum, to which m is near. This holds as long as S is linear in Q K^T, or
// the score says that a row's first scores tell where the others are (Part::FIRST_TILE_BOUNDS_MAX).
// Other scores take checked steps only.
#pragma once
#include "ptx.cuh"

// How P of a type is scaled, where row maxima are not always looked for. Scores may rise by as much
// as is left between P of the largest score and the limit before m has to follow.
template <class T>
struct PScale {  // float16 ends at 65504
    // log2 of P of a row's largest score, when m has just been set by it
    static constexpr int AT_MAX_LOG2 = 0;
    static constexpr float MAX_SUM = 0x1p15f;  // of a thread's part of a row sum
};
// bfloat16 has the range of float32, in which O = P V must fit, too: from 2^-31 on the small side
// to 2^8 on the large one, as in fa2_mma.cu, V of 1e35 or of 1e-28 are still exact.
template <>
struct PScale<bfloat16> {
    static constexpr int AT_MAX_LOG2 = -31;
    static constexpr float MAX_SUM = 0x1p8f;
};

// m of a row, once, or in registers of either bank: accumulators begin at an even one, and so do
// even columns.
template <bool TWICE>
struct Reference {
    float m;

    __device__ Reference& operator=(float x) { return m = x, *this; }
    __device__ float value() const { return m; }
    __device__ float of_column(int i) const { return m; }
};
template <>
struct Reference<true> {
    Twice m;

    __device__ Reference& operator=(float x) { return m = x, *this; }
    __device__ float value() const { return m.even(); }
    __device__ float of_column(int i) const { return i % 2 ? m.even() : m.odd(); }
};

// State of the rows that one thread holds: 16 mt + {0, 8} of its warp's rows, shared with three
// other lanes. P = exp2(scale_log2 S - m), with m in log2 units. EXACT spends an instruction a
// score, and a division an output, on rounding errors that float32 would show: there m is in the
// units of S, and P = exp2(scale_log2 (S - m)) exactly 1 at a row's maximum, so that a row with one
// key gives back its V. NATURAL scores, which may be of any size, have the same m: a difference of
// scores is right however large they are, and natural units hold all that float32 does. With m
// TWICE, the multiply-adds of P take it from a register of the other bank than the score's: see
// docs/design/fa3_wgmma.md.
template <int MT, bool EXACT, int AT_MAX_LOG2 = 0, bool TWICE = false, bool NATURAL = false>
struct OnlineSoftmax {
    static constexpr bool BY_DIFFERENCE = EXACT || NATURAL;
    static constexpr float LN_2 = 0.693147180559945309f;
    // The accumulators are rescaled only when a row maximum has outgrown the reference by this
    // factor (as a power of two): P then stays below 2^8, and the division by l at the end is exact
    // all the same.
    static constexpr float SLACK_LOG2 = 8.f;
    // Largest score where m is in log2 units: rounding m then makes P wrong by 2^8 at most, for all
    // keys alike, which l makes good.
    static constexpr float MAX_LOG2 = 0x1p28f;
    // Row sums from here on are not shifted to where P should be.
    static constexpr float MAX_SHIFTED = 0x1p64f;
    // m before any key has been seen, not above any finite score: P of a key is then infinite, or 1
    // if its score is as low, and of a masked one still 0.
    static constexpr float NONE = -0x1.fffffep127f;

    float scale_log2;
    Reference<TWICE> m[MT][2];
    float l[MT][2];      // this thread's part of the row sum
    float alpha[MT][2];  // exp(old reference - new one), of the last time that they moved

    __device__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) { reset(); }
    __device__ void reset() {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) m[mt][h] = NONE, l[mt][h] = 0.f;
    }

    // P = exp(S - value) from now on, whatever the scores are, unless `update` or `update_max` are
    // called.
    __device__ void fix(float value) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) m[mt][h] = value;
    }

    // S -> P = exp(S - m) in place; l, and O when m has moved, are brought up to date.
    template <int NT, int OT>
    __device__ void update(float (&rS)[MT][NT][4], float (&rO)[MT][OT][4],
                           float slack_log2 = SLACK_LOG2) {
        if (update_max(rS, slack_log2)) rescale(rO);
        exponentiate(rS);
    }

    // Moves the references m of those rows to their running maxima that have outgrown theirs too
    // far, if any of the warp's has. O must then be rescaled.
    template <int NT>
    __device__ bool update_max(const float (&rS)[MT][NT][4], float slack_log2 = SLACK_LOG2) {
        float row_max[MT][2];
        bool grown = false;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                row_max[mt][h] = fmaxf(rS[mt][0][2 * h], rS[mt][0][2 * h + 1]);
#pragma unroll
                for (int nt = 1; nt < NT; ++nt)
                    row_max[mt][h] =
                        fmaxf(row_max[mt][h], fmaxf(rS[mt][nt][2 * h], rS[mt][nt][2 * h + 1]));
                grown |= outgrown(row_max[mt][h], mt, h, slack_log2);
            }
        if (!__any_sync(0xffffffff, grown)) return false;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                update_row_max(lanes_max<4>(row_max[mt][h]), mt, h, slack_log2);
        return true;
    }

    // S -> P = exp(S - m) in place, added up in l.
    template <int NT>
    __device__ void exponentiate(float (&rS)[MT][NT][4]) {
        exponentiate(rS, [&](float s, float m, int h, int column) { return exponent(s, m); });
    }
    // The same, where the exponents are functions of a score, m, which of its two rows it is in,
    // and its column.
    template <int NT, class Exponent>
    __device__ void exponentiate(float (&rS)[MT][NT][4], Exponent exponent) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float of_column[2] = {m[mt][h].of_column(0), m[mt][h].of_column(1)};
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& s = rS[mt][nt][2 * h + i];
                        s = exp2_approx(exponent(s, of_column[i], h, nt * 8 + i));
                        l[mt][h] += s;
                    }
            }
    }
    // The same of one score of a row.
    __device__ float exponential(float s, int mt, int h) {
        const float p = exp2_approx(exponent(s, m[mt][h].value()));
        l[mt][h] += p;
        return p;
    }
    __device__ float exponent(float s, float m) const {
        return BY_DIFFERENCE ? (s - m) * scale_log2 : fmaf(s, scale_log2, -m);
    }

    // Where `update_max` did not look first, P may come out too large. Returns whether a thread's
    // part of a row sum is beyond its limit, in the warp. NaN is not: it stays NaN.
    template <class Limits>
    __device__ bool too_large(const Limits& limits) const {
        bool found = false;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) found |= l[mt][h] > limits(h);
        return __any_sync(0xffffffff, found);
    }
    // Then m of such rows moves up so far that the row sum becomes what P of 16 largest scores
    // would be, and P and l with it; O must be rescaled. `again` says which rows have sums so large
    // that this would take P and l below float32's range, or a limit beyond which P is something
    // else; where a sum is NaN, so is the row: l says so in all lanes, and is not too large any
    // more.
    template <int NT, class Limits>
    __device__ void shift_max(float (&rP)[MT][NT][4], const Limits& limits, bool (&again)[MT][2]) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float sum = lanes_sum<4>(l[mt][h]);
                const bool large = lanes_max<4>(l[mt][h]) > limits(h);
                const float most = limits.most_shifted(MAX_SHIFTED);
                again[mt][h] = large && sum >= most;
                const float step =
                    large && sum < most ? fmaxf(__log2f(sum) - 4.f - AT_MAX_LOG2, 0.f) : 0.f;
                const float m_old = m[mt][h].value();
                m[mt][h] = m_old + (NATURAL ? step * LN_2 : step);
                // By how far m moves: a small step may be lost in a large m.
                alpha[mt][h] =
                    exp2_approx(NATURAL ? (m_old - m[mt][h].value()) * scale_log2 : -step);
                l[mt][h] = sum == sum ? l[mt][h] * alpha[mt][h] : sum;
            }
        rescale(rP);
    }

    // Brings O to the references that have moved.
    template <int OT>
    __device__ void rescale(float (&rO)[MT][OT][4]) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int ot = 0; ot < OT; ++ot)
#pragma unroll
                for (int i = 0; i < 4; ++i) rO[mt][ot][i] *= alpha[mt][i / 2];
    }

    // Sets m of a row by its largest score, if that has outgrown it.
    __device__ void update_row_max(float row_max, int mt, int h, float slack_log2 = SLACK_LOG2) {
        const float m_old = m[mt][h].value();
        if (outgrown(row_max, mt, h, slack_log2))
            m[mt][h] = BY_DIFFERENCE ? row_max - AT_MAX_LOG2 * LN_2
                                     : fmaf(row_max, scale_log2, -AT_MAX_LOG2);
        alpha[mt][h] = exp2_approx((m_old - m[mt][h].value()) * (BY_DIFFERENCE ? scale_log2 : 1.f));
        l[mt][h] *= alpha[mt][h];
    }

    // Ends a tile of rows, and begins the next: sums l over the four lanes of a row, and returns
    // what O is to be divided by and the log-sum-exp (natural log), if it is asked for. A row that
    // saw no key has l = 0: `divide` makes its O 0; its log-sum-exp is -inf.
    __device__ void conclude(float (&divisor)[MT][2], float (&lse)[MT][2], bool with_lse) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float sum = lanes_sum<4>(l[mt][h]);
                const float m_of_sum =
                    EXACT && !NATURAL ? m[mt][h].value() * scale_log2 : m[mt][h].value();
                if (!BY_DIFFERENCE) sum = beyond(m_of_sum, sum);
                divisor[mt][h] = sum;
                if (with_lse) lse[mt][h] = log_sum_exp(m_of_sum, sum);
            }
        reset();
    }
    template <int OT>
    __device__ void divide(float (&rO)[MT][OT][4], const float (&divisor)[MT][2]) const {
        bool none = false;  // whether some row saw no key
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float inverse =
                    EXACT ? 1.f / divisor[mt][h] : reciprocal_approx(divisor[mt][h]);
                none |= divisor[mt][h] == 0.f;
#pragma unroll
                for (int ot = 0; ot < OT; ++ot)
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; ++i) {
                        const float o = rO[mt][ot][i], quotient = o * inverse;
                        // A Newton step rounds to nearest; it makes NaN of a number that is not
                        // finite.
                        rO[mt][ot][i] =
                            EXACT ? fmaf(fmaf(-quotient, divisor[mt][h], o), inverse, quotient)
                                  : quotient;
                    }
            }
        // 0 V is NaN where V is not finite. A branch, which the empty asm keeps one, hardly ever
        // taken
        if (EXACT || !__any_sync(0xffffffff, none)) return;
        asm volatile("");
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int i = 0; i < OT * 4; ++i)
                set_if_equal(rO[mt][i / 4][i % 4], divisor[mt][i / 2 % 2] == 0.f, true, 0.f);
    }

    // The multiply-adds of P no longer take out m of scores beyond MAX_LOG2: the sum is NaN, and
    // not a wrong number.
    static __device__ float beyond(float m_log2, float sum) {
        return m_log2 > NONE && !(fabsf(m_log2) <= MAX_LOG2) ? NAN : sum;
    }
    // Rows that saw no key have one, too. m is in log2 units, or NATURAL. EXACT rounds it once:
    // gradients are as wrong as it is.
    static __device__ float log_sum_exp(float m, float sum) {
        if (NATURAL) return sum == 0.f ? -INF : fmaf(EXACT ? log2f(sum) : __log2f(sum), LN_2, m);
        if (EXACT) return sum == 0.f ? -INF : fmaf(m, LN_2, logf(sum));
        return sum == 0.f ? -INF : (m + __log2f(sum)) * LN_2;
    }

 private:
    // Whether P of this score would be too large. False for -inf, and for NaN.
    __device__ bool outgrown(float row_max, int mt, int h, float slack_log2) const {
        if constexpr (BY_DIFFERENCE)
            return (row_max - m[mt][h].value()) * scale_log2 > slack_log2 + AT_MAX_LOG2;
        return fmaf(row_max, scale_log2, -m[mt][h].value()) > slack_log2 + AT_MAX_LOG2;
    }
};
