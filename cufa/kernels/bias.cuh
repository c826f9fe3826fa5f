#pragma once
#include "ptx_convert.cuh"
#include "score_arrays.cuh"

// An array that is added to the scores.
template <class T>
struct Bias : Part<Bias<T>> {
    static constexpr bool LINEAR = false, NATURAL = true;
    static constexpr bool FIRST_TILE_BOUNDS_MAX = false;  // -inf hides keys
    OfPairs<T> bias;
    __device__ float score(float s, const Pair& pair) const { return s + to_float(bias.at(pair)); }
};
using BiasFloat16 = Bias<float16>;
using BiasBfloat16 = Bias<bfloat16>;
using BiasFloat32 = Bias<float>;
