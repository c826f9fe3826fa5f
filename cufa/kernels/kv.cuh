// How a kernel finds K and V, and how long the sequences are.
#pragma once
#include "params.cuh"
#include "score.cuh"

// In (batch, heads, seq, dim) tensors, all sequences of the same lengths.
struct Dense {
    static __device__ Sequence sequence(const Params& p, int batch) { return {p.seq_q, p.seq_kv}; }

    // The rows of one head.
    template <class T>
    static __device__ const T* rows(const Tensor& t, int batch, int head) {
        return head_ptr<T>(t, batch, head);
    }

    // The same as coordinates of a tensor map: an axis along which all is the same (stride 0) has length 1 there.
    static __device__ int map_head(const Tensor& t, int head) { return t.stride_head ? head : 0; }
    static __device__ int map_batch(const Tensor& t, int batch) { return t.stride_batch ? batch : 0; }
};
