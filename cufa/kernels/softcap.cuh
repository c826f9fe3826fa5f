// c tanh(score / c) in place of a score.
#pragma once
#include "part.cuh"
#include "ptx.cuh"

// Even polynomials of S, by which S is multiplied. Right up to a product of `end`, log2 units, in
// magnitude; beyond, the product is larger still.
template <int TERMS>
struct Series {
    float terms[TERMS];
    float end;

    __device__ float operator()(float s) const {
        const float square = s * s;
        float sum = terms[TERMS - 1];
#pragma unroll
        for (int t = TERMS - 2; t >= 0; --t) sum = fmaf(sum, square, terms[t]);
        return sum;
    }
};
// A series of three terms, as a square: in between there is one number of each score, and none of
// the multiply-adds needs two of the parameters, so that those need no registers. See
// cufa/features/softcap.py.
struct Square {
    float root, middle, rest, end;

    __device__ float operator()(float s) const {
        const float inner = fmaf(s * root, s, middle);
        return fmaf(inner, inner, rest);
    }
};

// c tanh(score / c), in log2 units. The special function unit has its hands full with exponentials:
// where all scores of a warp are less than 3/4 c, as they nearly always are, a polynomial on the
// multiply-add units takes the place of tanh.
template <class Self>
struct Capping : Part<Self> {
    static constexpr bool LINEAR = false, TAKES_WHOLE_TILE = true;
    static constexpr float LIMIT = 0.75f;
    float softcap_log2, softcap_inverse;  // c and its reciprocal

    template <class At, int MT, int NT>
    __device__ void apply_all(float (&rS)[MT][NT][4], const Sequence& sequence, float& factor,
                              const At& at) const {
        const float scale_log2 = factor;
        const auto curve = static_cast<const Self*>(this)->curve(scale_log2);
        constexpr int CHAINS = 8;  // a maximum waits for the one before
        float largest[CHAINS] = {};
#pragma unroll
        for (int i = 0; i < MT * NT * 4; ++i)
            largest[i % CHAINS] =
                fmaxf(largest[i % CHAINS], fabsf(rS[i / (NT * 4)][i / 4 % NT][i % 4]));
#pragma unroll
        for (int i = 1; i < CHAINS; ++i) largest[0] = fmaxf(largest[0], largest[i]);
        if (__all_sync(0xffffffff,
                       curve.end > 0.f && largest[0] * scale_log2 * softcap_inverse <= LIMIT)) {
#pragma unroll
            for (int i = 0; i < MT * NT * 4; ++i) {
                float& s = rS[i / (NT * 4)][i / 4 % NT][i % 4];
                s *= curve(s);
            }
        } else {
            cap(rS, scale_log2);
        }
        factor = 1.f;
    }
    // The same without the curve.
    template <int MT, int NT>
    __device__ void cap(float (&rS)[MT][NT][4], float scale_log2) const {
        const float inverse = scale_log2 * softcap_inverse;
#pragma unroll
        for (int i = 0; i < MT * NT * 4; ++i) {
            float& s = rS[i / (NT * 4)][i / 4 % NT][i % 4];
            s = static_cast<const Self*>(this)->capped(s, inverse);
        }
    }
    __device__ float score(float s, const Pair& pair) const {
        return static_cast<const Self*>(this)->capped(s, softcap_inverse);
    }
};
// By the hardware's tanh, whose error of 2^-11 is a quarter of what bfloat16 leaves of a score; the
// polynomial's is 2^-12.
struct Softcap : Capping<Softcap> {
    static constexpr int CURVE_TERMS = 3;
    float softcap_root, softcap_middle, softcap_rest, softcap_end;

    // The curve for the launch's scale, which comes in front of all other parts.
    __device__ Square curve(float) const {
        return {softcap_root, softcap_middle, softcap_rest, softcap_end};
    }
    __device__ float capped(float s, float inverse) const {
        return softcap_log2 * tanh_approx(s * inverse);
    }
};
// By an exponential and a reciprocal, to some 2^-22 of c, as float16 leaves four times as much; the
// polynomial's is 2^-20 of the score.
struct FineSoftcap : Capping<FineSoftcap> {
    static constexpr int CURVE_TERMS = 5;
    static constexpr float TANH_LIMIT = 0.635148952f;
    static constexpr float TANH[] = {0.9999994636f, -0.3332825303f, 0.1325899065f, -0.0500564910f,
                                     0.0129297795f};

    __device__ Series<CURVE_TERMS> curve(float scale_log2) const {
        const float inverse = scale_log2 * softcap_inverse;
        Series<CURVE_TERMS> curve;
        float power = softcap_log2 * inverse;
#pragma unroll
        for (int i = 0; i < CURVE_TERMS; ++i)
            curve.terms[i] = TANH[i] * power, power *= inverse * inverse;
        // Powers of other factors would leave float32's range.
        curve.end = inverse > 0x1p-12f && inverse < 0x1p12f ? TANH_LIMIT * softcap_log2 : 0.f;
        return curve;
    }
    __device__ float capped(float s, float inverse) const {
        constexpr float TWO_LOG2_E = 2.885390081777926815f;
        // tanh(x) = 1 - 2 / (e^2x + 1)
        const float power = exp2_approx(s * (inverse * TWO_LOG2_E));
        return fmaf(-2.f * softcap_log2, reciprocal_approx(power + 1.f), softcap_log2);
    }
};
struct ExactSoftcap : Part<ExactSoftcap> {
    static constexpr bool LINEAR = false, TAKES_WHOLE_TILE = true;
    float softcap_log2, softcap_inverse;

    template <class At, int MT, int NT>
    __device__ void apply_all(float (&rS)[MT][NT][4], const Sequence& sequence, float& factor,
                              const At& at) const {
#pragma unroll
        for (int i = 0; i < MT * NT * 4; ++i) {
            float& s = rS[i / (NT * 4)][i / 4 % NT][i % 4];
            s = softcap_log2 * tanhf(s * factor * softcap_inverse);
        }
        factor = 1.f;
    }
    __device__ float score(float s, const Pair& pair) const {
        return softcap_log2 * tanhf(s * softcap_inverse);
    }
};

// Up to where a thread's part of a row sum tells that P is right, where row maxima are not looked
// for.
template <class SCALE, bool CURVES>
struct SumLimits {
    __device__ float operator()(int) const { return SCALE::MAX_SUM; }
    __device__ float most_shifted(float most) const { return most; }
};
// The same where a curve took the place of scores, which may not be right beyond its end: P there
// is larger than at the end.
template <class SCALE>
struct SumLimits<SCALE, true> {
    // The most that scores as low as the curve's other end may weigh, next to the largest, so that
    // their error does not matter.
    static constexpr float LEAST_LOG2 = -25.f;
    float of_row[2] = {SCALE::MAX_SUM, SCALE::MAX_SUM};
    bool curved = false;

    // Takes the curve from here on, unless one of the warp's rows may have scores beyond its ends,
    // +-end in log2 units. To be asked when m has moved; that sums grow is seen by the limits.
    template <class Softmax>
    __device__ void follow(const Softmax& softmax, float end) {
        curved = end > 0.f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float m = softmax.m[0][h].value(), sum = exp2_approx(end - m);
            curved &= softmax.l[0][h] < sum && -end - m < LEAST_LOG2 + SCALE::AT_MAX_LOG2;
            of_row[h] = fminf(sum, SCALE::MAX_SUM);
        }
        curved = __all_sync(0xffffffff, curved);
        if (!curved) of_row[0] = of_row[1] = SCALE::MAX_SUM;
    }
    __device__ float operator()(int h) const { return of_row[h]; }
    __device__ float most_shifted(float most) const { return curved ? 0.f : most; }
};
