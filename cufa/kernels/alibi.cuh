#pragma once
#include "score_arrays.cuh"

// Attention with linear biases (Press et al. 2022): the further a key is from where its query
// stands, the less it counts.
struct Alibi : Part<Alibi> {
    static constexpr bool LINEAR = false, TAKES_WHOLE_TILE = true, AFFINE_IN_KEY = true;
    OfHeads<float> alibi_slopes;

    // Distances are counted on in float32: the conversion of an integer takes as long as an
    // exponential.
    template <class At, int MT, int NT>
    __device__ void apply_all(float (&rS)[MT][NT][4], const Sequence& sequence, float& factor,
                              const At& at) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float slope = LOG2_E * alibi_slopes.at(at.batch, at.head(mt, h));
                const float first =
                    static_cast<float>(at.query(mt, h) + sequence.diagonal() - at.key_of(0, 0));
#pragma unroll
                for (int i = 0; i < NT * 2; ++i) {
                    float& s = rS[mt][i / 2][2 * h + i % 2];
                    s = fmaf(s, factor,
                             -slope * fabsf(first - static_cast<float>(i / 2 * 8 + i % 2)));
                }
            }
        factor = 1.f;
    }
    __device__ float score(float s, const Pair& pair) const {
        const float distance =
            fabsf(static_cast<float>(pair.query + pair.sequence.diagonal() - pair.key));
        return fmaf(-LOG2_E * alibi_slopes.at(pair.batch, pair.head), distance, s);
    }
    __device__ float step(const Pair& pair, int side) const {
        return side * LOG2_E * alibi_slopes.at(pair.batch, pair.head);
    }
    __device__ int turn(const Pair& pair) const {
        return pair.query + pair.sequence.diagonal() - pair.key;
    }
};
