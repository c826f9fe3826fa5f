#pragma once
#include "score_arrays.cuh"

// An array that says which keys are seen: a byte each, or a bit, the highest of a byte first;
// `stride_key` is that of bytes.
struct Mask : Part<Mask> {
    static constexpr bool PAIRWISE = true;
    OfPairs<unsigned char> mask;
    __device__ bool hides(const Pair& pair) const { return !mask.at(pair); }
};
struct MaskBits : Part<MaskBits> {
    static constexpr bool PAIRWISE = true;
    OfPairs<unsigned char> mask;
    __device__ bool hides(const Pair& pair) const {
        return !(mask.row(pair)[(pair.key >> 3) * mask.stride_key] >> (7 - pair.key % 8) & 1);
    }
};
