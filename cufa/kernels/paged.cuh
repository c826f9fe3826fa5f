// How decode.cu finds K and V, and how long the sequences are.
#pragma once
#include "decode_params.cuh"
#include "score.cuh"

// A cache of (batch, heads, capacity, dim), or of broadcast parts of it.
struct Contiguous {
    static constexpr bool PAGED = false;
    template <int BN>
    static constexpr __device__ int grain() {
        return BN;
    }
    __device__ const int* entry(int batch, int key) const { return nullptr; }
    __device__ int page(int entry) const { return 0; }
    template <class T>
    __device__ const T* row(const Tensor& t, int batch, int kv_head, int key, int page) const {
        return head_ptr<T>(t, batch, kv_head) + key * t.stride_seq;
    }
};

// Pages of (heads, page_size, dim), which a table names in the order of each sequence's keys. The
// table is not trusted: no page is looked for outside the cache.
struct Paged {
    static constexpr bool PAGED = true;
    const int* block_table;  // (batch, at least what holds the longest sequence)
    int table_stride, pages;
    Divisor page_size;

    // The number of keys, from a multiple of it on, that lie in one page.
    template <int BN>
    static constexpr __device__ int grain() {
        return 1;
    }
    __device__ const int* entry(int batch, int key) const {
        return block_table + static_cast<long long>(batch) * table_stride + page_size.quotient(key);
    }
    __device__ int page(int entry) const { return min(max(entry, 0), pages - 1); }
    template <class T>
    __device__ const T* row(const Tensor& t, int batch, int kv_head, int key, int page) const {
        return head_ptr<T>(t, page, kv_head) + page_size.remainder(key) * t.stride_seq;
    }
};
// Pages that hold whole sixteens of keys.
struct PagedSixteens : Paged {
    template <int BN>
    static constexpr __device__ int grain() {
        return 16;
    }
};
// Pages that hold whole tiles of keys.
struct PagedTiles : Paged {
    template <int BN>
    static constexpr __device__ int grain() {
        return BN;
    }
};

// The length at a place, as L2 has it; and the keys of a sequence: a length that does not fit the
// cache is cut.
__device__ inline int length_at(const DecodeParams& p, const int* at) {
    return p.lengths ? ld_relaxed(at) : p.seq_kv;
}
__device__ inline int keys_of_length(const DecodeParams& p, int length) {
    return min(max(length, 0), p.seq_kv);
}
__device__ inline int keys_of(const DecodeParams& p, int batch) {
    return keys_of_length(p, length_at(p, p.lengths + batch));
}
