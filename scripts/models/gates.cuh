#pragma once

// What a gated perceptron (Shazeer 2020) makes of its gate: x times the logistic function, or times the normal
// distribution's in its form by tanh (Hendrycks and Gimpel 2016).
enum Gate { SILU, GELU };

template <Gate GATE>
__device__ inline float gate(float x) {
    if constexpr (GATE == SILU) return x / (1.f + expf(-x));
    return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}
