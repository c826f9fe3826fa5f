#pragma once
#include "part.cuh"

// A window around the key that a query stands at: as many keys before it and after it.
struct WindowLeft : Part<WindowLeft> {
    static constexpr bool LEFT_EDGE = true;
    int window_left;
    __device__ Keys sees(const Sequence& sequence, int query) const {
        return {query + sequence.diagonal() - window_left, sequence.seq_kv};
    }
};
struct WindowRight : Part<WindowRight> {
    static constexpr bool RIGHT_EDGE = true;
    int window_right;
    __device__ Keys sees(const Sequence& sequence, int query) const {
        return {0, query + 1 + sequence.diagonal() + window_right};
    }
};
