// Work items of decode.cu: a sequence, a KV head and a tile of rows.
#pragma once
#include "decode_params.cuh"
#include "paged.cuh"

// How many keys sequences have. Of few sequences each lane has one's, all from one look; those of
// many are read where they are needed. With WHOLE, a block needs one only.
template <bool WHOLE>
struct Lengths {
    bool few;
    int of_lane;  // of few

    __device__ void look(const DecodeParams& p) {
        few = !WHOLE && p.batch <= 32;
        of_lane = few ? keys_of_length(p, length_at(p, place(p, threadIdx.x % 32))) : 0;
    }
    // Of many, as L2 has it, which the kernel in front may still change.
    __device__ int keys_ahead(const DecodeParams& p, int batch) const {
        if (few) return __shfl_sync(0xffffffff, of_lane, batch);
        return keys_of_length(p, length_at(p, p.lengths + batch));
    }
    // Of many, when that has ended.
    __device__ int keys(const DecodeParams& p, int batch) const {
        if (few) return __shfl_sync(0xffffffff, of_lane, batch);
        return p.lengths ? keys_of_length(p, p.lengths[batch]) : p.seq_kv;
    }
    // Each lane has one, if some the last: a branch of lanes in front of a load has misled ptxas,
    // see docs/kernels.md.
    static __device__ const int* place(const DecodeParams& p, int batch) {
        return p.lengths + min(batch, p.batch - 1);
    }
};

// A work item, and where its tiles lie among its block's: from `begin` on, which is less than 0 if
// another block has the first ones. Tiles before a window are not counted. A sequence without keys
// has a tile, too, in which nothing is seen: it has outputs.
template <class ARGUMENTS, int BN>
struct WorkItem {
    int batch, index;      // of a sequence's items
    int keys;              // of the sequence
    int zero;              // where the sequence's first tile is, or would be
    int first = 0, tiles;  // that it visits

    __device__ int begin() const { return zero + first; }
    __device__ int end() const { return begin() + tiles; }
    __device__ void begin_at(int place) { zero = place - first; }
    // Goes to the next item, but not beyond the last sequence: before the kernel in front has
    // ended, two looks at lengths may find other ones.
    template <class Lengths>
    __device__ void next(const ARGUMENTS& p, const Lengths& lengths) {
        const int place = end();
        if (++index == p.items.divisor)
            index = 0, batch = min(batch + 1, p.batch - 1), set_keys(p, lengths.keys(p, batch));
        begin_at(place);
    }
    __device__ int kv_head(const DecodeParams& p) const { return p.row_tiles.quotient(index); }
    __device__ int row_tile(const DecodeParams& p) const { return p.row_tiles.remainder(index); }
    __device__ void set_keys(const ARGUMENTS& p, int n) {
        keys = n, first = first_of(p, n), tiles = tiles_of(p, n);
    }
    __device__ int first_key(const ARGUMENTS& p) const { return first_key_of(p, keys); }
    // Whether it visits the same tiles if the sequence has that many keys.
    __device__ bool is_same_with(const ARGUMENTS& p, int n) const {
        return tiles_of(p, n) == tiles && first_of(p, n) == first;
    }

    static __device__ int tiles_of(const ARGUMENTS& p, int keys) {
        return max((static_cast<uint32_t>(keys) + BN - 1) / BN, 1u) - first_of(p, keys);
    }
    static __device__ int first_of(const ARGUMENTS& p, int keys) {
        return ARGUMENTS::LEFT_EDGE ? max(0, min(first_key_of(p, keys), keys - 1)) / BN : 0;
    }
    // That the first query sees: none sees one before it.
    static __device__ int first_key_of(const ARGUMENTS& p, int keys) {
        return p.sees(Sequence{p.seq_q, keys}, 0).first;
    }
};

// The rows of an item's tile: those of the heads that share the KV head, query by query.
struct ItemRows {
    int batch, first_head, first, rows;

    template <class ARGUMENTS, int BN>
    __device__ ItemRows(const DecodeParams& p, const WorkItem<ARGUMENTS, BN>& item, int bm)
        : batch(item.batch),
          first_head(item.kv_head(p) * p.group.divisor),
          first(item.row_tile(p) * bm),
          rows(min(p.group.divisor * p.seq_q - first, bm)) {}
    __device__ int query(const DecodeParams& p, int row) const {
        return p.group.quotient(first + row);
    }
    __device__ int head(const DecodeParams& p, int row) const {
        return first_head + p.group.remainder(first + row);
    }
    template <class T>
    __device__ T* of(const DecodeParams& p, const Tensor& t, int row) const {
        return head_ptr<T>(t, batch, head(p, row)) + query(p, row) * t.stride_seq;
    }
};

// The blocks that have splits of an item: from `begin` to the one before `end`.
struct Splits {
    int begin, end;

    __device__ bool one() const { return end - begin == 1; }
};
