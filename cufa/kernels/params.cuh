// The parameters of every kernel, by value. cufa/specs/params.py holds the same layout as a NumPy
// dtype.
#pragma once

// A (batch, heads, seq, dim) tensor whose last axis is contiguous. Strides are in elements.
struct Tensor {
    void* data;
    long long stride_batch, stride_head, stride_seq;
};

struct Params {
    Tensor q, k, v, o;
    float* lse;          // (batch, heads, seq_q) of single heads, natural log; null when not wanted
    float* workspace;    // FlashAttention-1 only: m, then l, each (batch, heads_q, seq_q)
    int* tiles_drawn;    // fa3_wgmma where tiles differ in length: 0 before and after a launch
    float scale_log2;    // softmax scale times log2(e), > 0
    int heads_q, group;  // group = heads_q / heads_kv; both count packs of heads, see pack_log2
    int seq_q, seq_kv;
    int head_dim, head_dim_v;
    int q_tiles;        // row tiles of one head
    int heads;          // batch * heads_q, of packs
    int section_heads;  // heads whose tiles are interleaved, see scheduler.cuh
    int late_rows;      // row tiles of each head that come last, see scheduler.cuh
    int pack_log2;  // fa3_wgmma only: a tile holds rows of 2^pack_log2 neighbouring query heads,
                    // query by query
};

template <class T>
__device__ T* head_ptr(const Tensor& t, int batch, int head) {
    return static_cast<T*>(t.data) + batch * t.stride_batch + head * t.stride_head;
}
