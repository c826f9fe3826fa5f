#pragma once

// The gate of a gated perceptron (Shazeer 2020) on two numbers: the first times the logistic function of it, or times
// the normal distribution's in its form by tanh (Hendrycks and Gimpel 2016), times the second; or gpt-oss's, whose
// operands are cut off.
enum Gate { SILU, GELU, CLAMPED };

template <Gate GATE>
__device__ inline float gate(float a, float b) {
    if constexpr (GATE == CLAMPED) {
        constexpr float LIMIT = 7.f, ALPHA = 1.702f;
        a = a > LIMIT ? LIMIT : a;  // NaN stays
        b = b > LIMIT ? LIMIT : b < -LIMIT ? -LIMIT : b;
        return a / (1.f + expf(-ALPHA * a)) * (b + 1.f);
    } else if constexpr (GATE == GELU) {
        return 0.5f * a * (1.f + tanhf(0.7978845608f * (a + 0.044715f * a * a * a))) * b;
    } else {
        return a / (1.f + expf(-a)) * b;
    }
}
