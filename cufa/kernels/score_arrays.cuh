// Arrays that parts of a score read where they are, with strides in elements, 0 along an axis on
// which nothing depends.
#pragma once
#include "part.cuh"

constexpr float LOG2_E = 1.442695040888963407f;

// (batch, heads)
template <class T>
struct OfHeads {
    const T* data;
    long long stride_batch, stride_head;

    __device__ const T* line(int batch, int head) const {
        return data + batch * stride_batch + head * stride_head;
    }
    __device__ T at(int batch, int head) const { return *line(batch, head); }
};
// (batch, heads, seq_q, seq_kv)
template <class T>
struct OfPairs {
    const T* data;
    long long stride_batch, stride_head, stride_query, stride_key;

    __device__ const T* row(const Pair& pair) const {
        return data + pair.batch * stride_batch + pair.head * stride_head +
               pair.query * stride_query;
    }
    __device__ T at(const Pair& pair) const { return row(pair)[pair.key * stride_key]; }
};
