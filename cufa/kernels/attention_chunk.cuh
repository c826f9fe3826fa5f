// Chunked attention: a query sees the keys of the chunk that it stands in.
#pragma once
#include "part.cuh"

struct AttentionChunk : Part<AttentionChunk> {
    static constexpr bool LEFT_EDGE = true, RIGHT_EDGE = true, JUMPS = true;
    int attention_chunk;  // keys of a chunk
    // None where it stands before the first key.
    __device__ Keys sees(const Sequence& sequence, int query) const {
        const int stands = query + sequence.diagonal();
        if (stands < 0) return {0, 0};
        const int first = stands - stands % attention_chunk;
        return {first, first + attention_chunk};
    }
};
