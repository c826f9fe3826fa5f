// Causal masks.
#pragma once
#include "part.cuh"

struct Causal : Part<Causal> {
    static constexpr bool RIGHT_EDGE = true, NO_KEYS_AHEAD = true;
    __device__ Keys sees(const Sequence& sequence, int query) const {
        return {0, query + 1 + sequence.diagonal()};
    }
};

// Aligned top-left: query i stands at key i.
struct TopLeft : Part<TopLeft> {
    static constexpr bool RIGHT_EDGE = true;
    __device__ Keys sees(const Sequence& sequence, int query) const { return {0, query + 1}; }
};
