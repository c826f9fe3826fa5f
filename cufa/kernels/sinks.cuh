#pragma once
#include "score_arrays.cuh"

// A logit of each head that takes part in the softmax, and has no value (gpt-oss).
struct Sinks : Part<Sinks> {
    static constexpr bool NEEDS_LSE = true, ENDS_ROWS = true;
    const float* sinks;
    long long stride_head;

    // A row that saw no key keeps its divisor of 0. Beyond 2^100 times the sum of the keys, nothing
    // of O is left.
    __device__ void end_row(float& divisor, float& lse, int head) const {
        const float logit = sinks[head * stride_head];
        const float above_lse = (logit - lse) * LOG2_E;
        if (lse == -INF) {
            lse = logit;
        } else if (logit != -INF) {
            const float more = 1.f + exp2f(above_lse);
            divisor *= more > 0x1p100f ? 0x1p100f : more;  // NaN stays
            lse = fmaxf(lse, logit) + log1pf(exp2f(-fabsf(above_lse)));
        }
    }
};
