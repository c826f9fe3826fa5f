// How decode.cu finds K and V, and how long the sequences are.
#pragma once
#include "decode_params.cuh"
#include "score.cuh"

// A cache of (batch, heads, capacity, dim), or of broadcast parts of it.
struct Contiguous {
    static constexpr bool PAGED = false, WHOLE = true;  // WHOLE: the keys of a tile follow each other
    __device__ int page(int batch, int key) const { return 0; }
    template <class T>
    __device__ const T* row(const Tensor& t, int batch, int kv_head, int key, int page) const {
        return head_ptr<T>(t, batch, kv_head) + key * t.stride_seq;
    }
};

// Pages of (heads, page_size, dim), which a table names in the order of each sequence's keys. What the table says is not
// believed: no page is looked for outside the cache.
struct Paged {
    static constexpr bool PAGED = true, WHOLE = false;
    const int* block_table;  // (batch, at least what holds the longest sequence)
    int table_stride, pages;
    Divisor page_size;

    // As L2 has it.
    __device__ int page(int batch, int key) const {
        const int* entry = block_table + static_cast<long long>(batch) * table_stride + page_size.quotient(key);
        return min(max(ld_relaxed(entry), 0), pages - 1);
    }
    template <class T>
    __device__ const T* row(const Tensor& t, int batch, int kv_head, int key, int page) const {
        return head_ptr<T>(t, page, kv_head) + page_size.remainder(key) * t.stride_seq;
    }
};
// Pages that hold whole tiles of keys.
struct PagedTiles : Paged {
    static constexpr bool WHOLE = true;
};

// The keys of a sequence, as L2 has them. Lengths that do not fit the cache are cut.
__device__ inline int keys_of(const DecodeParams& p, int batch) {
    return p.lengths ? min(max(ld_relaxed(p.lengths + batch), 0), p.seq_kv) : p.seq_kv;
}
