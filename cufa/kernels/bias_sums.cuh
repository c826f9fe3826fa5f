// A bias whose gradient is added up.
#pragma once
#include "array_sums.cuh"
#include "bias.cuh"

// Sums, with strides in elements, 0 along an axis that they lack.
struct BiasPlaces {
    float* sums;
    long long stride_batch, stride_head, stride_query, stride_key;
};
// Sums of pairs have the axes that the bias has. Others lack queries or keys, and are of all
// batches and heads: each key belongs to one thread of one block.
template <class T, bool OF_QUERIES, bool OF_KEYS>
struct BiasInSums : BiasPlaces, Bias<T> {
    static constexpr int SUMS = 1;
    static constexpr bool BY_QUERY[] = {OF_QUERIES}, BY_KEY[] = {OF_KEYS}, COLLIDES = !OF_KEYS;

    __device__ float partial(Read<0>, float s, const Pair& pair) const { return 1.f; }
    __device__ float* place(Read<0>, float s, const Pair& pair) const {
        return sums + pair.batch * stride_batch + pair.head * stride_head +
               pair.query * BiasPlaces::stride_query + pair.key * BiasPlaces::stride_key;
    }
};
